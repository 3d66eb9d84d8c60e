"""One round of federated learning. Read this first.

    run_round       train_clients, then finish_round, then the round's record
    train_clients   Sample clients. Send each its part of the global state and the method's
                    broadcast. The engine trains them. Receive their updates (`exchange.py`).
    finish_round    Reject invalid updates (`validation.py`). Merge the others, and check the state
                    that results (`state_check.py`): if it is not usable, find the responsible
                    updates (`aggregation.py`) and merge again without them. Then end the round.
    merge_updates   Run the stages of the aggregation (`pipeline.py`).
    end_round       Ask clients for collections, such as BatchNorm statistics (`collection.py`).
                    Start to evaluate every size.
                    If clients have models of their own, they are asked for the scores of these
                    instead (`own_models.py`). If no weights are exchanged, nothing is aggregated.
                    If the run asks for it, score clients on their own test examples
                    (`client_scores.py`).

Every function takes a server state and returns what it computes; nothing is changed in place. If a
round is interrupted, the state before it is still whole and can be saved.

`speculation.finish_round` can take the place of `finish_round`. It keeps a GPU busy and gives the
same results; nothing here depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.evaluate import PendingScores
from motley.limits import allocating
from motley.privacy import Accountant
from motley.privacy.releases import ReleaseCounter
from motley.server.aggregation import Merged, find_responsible, merge_updates
from motley.server.client_scores import PendingClientScores, start_client_scores
from motley.server.collection import run_collections
from motley.server.context import ReleaseLog, RoundContext
from motley.server.exchange import bytes_down, bytes_up, make_job, receive, start_check
from motley.server.metrics import PendingMetrics
from motley.server.record import PendingRecord, RoundRecord
from motley.server.state import ServerState
from motley.server.timing import Timer, add_up
from motley.server.validation import UpdateCheck


@dataclass(frozen=True)
class Attempt:
    """A round up to the clients' updates.

    updates: the updates that have the right shapes.
    check: tells which of them are valid, once the device has computed them.
    failures: client -> why there is no update of it, or not one of the right shapes.
    idle: clients that had no batch to train on.
    was_merged: the updates were merged, but the state that they gave was not usable.
    """

    clients: list[int]
    updates: Sequence[ClientUpdate]
    check: UpdateCheck
    failures: dict[int, str]
    idle: list[int]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    was_merged: bool = False

    @property
    def rejected(self) -> dict[int, str]:
        """Client -> why it does not count in the round. Waits for the check."""
        return {**self.failures, **self.check.verdict.rejected}


@dataclass(frozen=True)
class Ending:
    """The rest of a round. The device may still be computing the evaluation and the metrics.

    rejected: client -> why its answer in a collection was rejected.
    excluded: client -> why its update, which seemed valid, was left out of the merge.
    """

    server: ServerState
    evaluation: PendingScores | None
    metrics: PendingMetrics
    client_scores: PendingClientScores | None
    rejected: dict[int, str]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    excluded: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Undone:
    """An attempt that did not end the round.

    rejected: client -> why its update does not count.
    problem: what was wrong with the state after the merge; None if too few updates were accepted.
    """

    rejected: dict[int, str]
    problem: str | None = None


#: Rejects an attempt's invalid updates and ends the round, if enough are left.
FinishRound = Callable[[RoundContext, ServerState, Attempt], Ending | Undone]


def run_round(
    context: RoundContext, server: ServerState, done: Done, finish: FinishRound | None = None
) -> tuple[ServerState, PendingRecord]:
    """Run the round after `server`; return the server state after it, and the round's record.

    While too few updates are valid, or the state after the merge is not usable, the round is
    repeated with other clients. `done` is called with the id of every client that has finished.
    `finish` takes the place of `finish_round`.
    """
    finish = finish or finish_round
    failed: list[Attempt] = []
    problem: str | None = None
    while len(failed) < context.attempts:
        attempt = train_clients(context, server, len(failed), done)
        ending = finish(context, server, attempt)
        if isinstance(ending, Ending):
            return record_round(context, failed, attempt, ending)
        problem = ending.problem
        undone = replace(attempt, failures=ending.rejected, was_merged=problem is not None)
        if undone.was_merged and context.release_log is not None:
            note_merge(context.release_log, server.round_number + 1, len(failed), undone)
        failed.append(undone)
    tried = f"round {server.round_number + 1} was tried {context.attempts} times (server.attempts)"
    if problem is not None:
        raise MotleyError(
            f"{tried} and never ended with a usable state. The last time, {problem}, and that was "
            "not due to a few clients. The state before the round is kept. If training diverges, "
            "lower the learning rate; server.max_norm and server.merge limit what clients can do."
        )
    reasons = [f"client {client}: {reason}" for client, reason in failed[-1].rejected.items()]
    raise MotleyError(
        f"{tried} and never had {context.min_fraction:.0%} of its updates (server.min_fraction). "
        f"The last time: {' '.join(reasons)}"
    )


def train_clients(
    context: RoundContext, server: ServerState, attempt_number: int, done: Done
) -> Attempt:
    """Sample clients, have the engine train them, and receive their updates.

    `attempt_number` is 0, or higher if the round is repeated with other clients.
    """
    timer = Timer()
    with timer.phase("train"):
        round_number = server.round_number + 1
        clients = context.sample(round_number, attempt_number)
        jobs = [make_job(context, server, round_number, client) for client in clients]
        if context.release_log is not None:
            # Before anything can be sent: if the process is killed now, the requests count.
            context.release_log.add_request(round_number, attempt_number, clients)
        with allocating(f"round {round_number}: training with batches of {context.batch_size}"):
            answers = context.engine.train(jobs, done)
        updates, failures = receive(context, jobs, answers)
        check = start_check(context, server, updates)
    answered = {answer.client for answer in answers}
    return Attempt(
        clients=clients,
        updates=check.updates,
        check=check,
        failures=failures,
        idle=[client for client in clients if client not in answered],
        bytes_down=bytes_down(jobs),
        bytes_up=bytes_up(answers),
        seconds=timer.seconds,
    )


def finish_round(context: RoundContext, server: ServerState, attempt: Attempt) -> Ending | Undone:
    """Check the updates, merge the valid ones, check the result, and end the round.

    If the state after the merge is not usable, the round ends without the responsible updates.
    """
    if not enough_updates(context, attempt):
        return Undone(attempt.rejected)
    accepted, metrics = attempt.check.verdict.accepted, attempt.check.metrics
    merged = merge_updates(context, server, accepted, metrics)
    excluded: dict[int, str] | None = {}
    # Clients are not asked for collections before the state has passed.
    if merged.problem is not None:
        max_excluded = num_dispensable(context, attempt)
        excluded = find_responsible(context, server, accepted, merged.problem, max_excluded)
        if excluded is None:
            reason = f"the round was undone: {merged.problem}."
            undone = {update.client: reason for update in accepted}
            return Undone({**undone, **attempt.rejected}, merged.problem)
        rest = [update for update in accepted if update.client not in excluded]
        merged = merge_updates(context, server, rest, metrics)
    return end_round(context, merged, attempt.clients, excluded)


def enough_updates(context: RoundContext, attempt: Attempt) -> bool:
    """Tell whether a round can end. Clients without examples count as if they had sent updates."""
    return num_dispensable(context, attempt) >= 0


def num_dispensable(context: RoundContext, attempt: Attempt) -> int:
    """Return how many more updates may be left out before the round has too few."""
    sampled = len(attempt.clients)
    needed = math.ceil(context.min_fraction * sampled - 1e-9)
    return sampled - len(attempt.rejected) - needed


def end_round(
    context: RoundContext,
    merged: Merged,
    clients: Sequence[int],
    excluded: dict[int, str] | None = None,
) -> Ending:
    """Collect from clients, and start to evaluate. `clients` are all that were sampled."""
    timer = Timer()
    collected = run_collections(
        context.collections, context.engine, merged.server, clients, context.device
    )
    server, evaluation = collected.server, collected.evaluation
    is_evaluated = context.algorithm.info.is_evaluated(server.round_number)
    if is_evaluated and not context.has_own_models:
        with timer.phase("evaluate"):
            evaluation = context.evaluator.start(server.model, server.round_number)
    client_scores, rejected = None, collected.rejected
    if context.score_clients is not None:
        with timer.phase("evaluate"):
            client_scores, unusable = start_client_scores(
                context.score_clients, context.engine, server, clients, context.device
            )
        rejected = {**rejected, **unusable}
    return Ending(
        server=server,
        evaluation=evaluation,
        metrics=PendingMetrics({**merged.metrics, **collected.metrics}),
        client_scores=client_scores,
        rejected=rejected,
        bytes_down=collected.bytes_down,
        bytes_up=collected.bytes_up,
        seconds=add_up([merged.seconds, timer.seconds, collected.seconds]),
        excluded=excluded or {},
    )


def note_merge(log: ReleaseLog, round_number: int, number: int, attempt: Attempt) -> None:
    """Account for an attempt that was merged and undone.

    That it was undone is known from now on, and depends on each of its updates.
    """
    accepted = [update.client for update in attempt.check.verdict.accepted]
    log.add_mean(round_number, number, attempt.clients, accepted, True)


def count_requests(
    accountant: Accountant, server: ServerState, attempts: Sequence[Attempt]
) -> ReleaseCounter:
    """Count the requests to clients in a round, for runs without a `release_log`."""
    counter = ReleaseCounter(accountant, server.ledger)
    for number, attempt in enumerate(attempts):
        counter.add_request(server.round_number, number, attempt.clients)
        if attempt.was_merged:
            note_merge(counter, server.round_number, number, attempt)
    return counter


def record_round(
    context: RoundContext, failed: Sequence[Attempt], attempt: Attempt, ending: Ending
) -> tuple[ServerState, PendingRecord]:
    """Account for the privacy spent, and assemble the round's record.

    `failed` are the attempts at the round before the one that has ended. They cost privacy, time
    and traffic too.
    """
    server, verdict = ending.server, attempt.check.verdict.without(ending.excluded)
    epsilon: dict[str, float] = {}
    if context.accountant is not None:
        accepted = [update.client for update in verdict.accepted]
        log: ReleaseLog
        if context.release_log is not None:
            log = context.release_log
        else:
            log = count_requests(context.accountant, server, [*failed, attempt])
        ledger = log.add_mean(
            server.round_number, len(failed), attempt.clients, accepted, bool(ending.excluded)
        )
        server = replace(server, ledger=ledger)
        epsilon = context.accountant.epsilon(ledger)
    is_evaluated = context.algorithm.info.is_evaluated(server.round_number)
    attempts = [*failed, attempt]
    seconds = [one.seconds for one in attempts] + [one.check.verdict.seconds for one in attempts]
    record = RoundRecord(
        round_number=server.round_number,
        clients=attempt.clients,
        refused={**ending.rejected, **attempt.failures, **verdict.rejected},
        repeated=[earlier.rejected for earlier in failed],
        idle=attempt.idle,
        train_loss=verdict.train_loss,
        num_steps=sum(update.num_steps for update in verdict.accepted),
        epsilon=epsilon,
        why_no_scores=context.why_no_scores if is_evaluated else "",
        seconds=add_up([*seconds, ending.seconds]),
        bytes_down=ending.bytes_down + sum(one.bytes_down for one in attempts),
        bytes_up=ending.bytes_up + sum(one.bytes_up for one in attempts),
    )
    pending = PendingRecord(record, ending.evaluation, ending.metrics, ending.client_scores)
    return server, pending
