"""One round of federated learning. Read this first.

    run_round       train_clients, then finish_round, then the round's record
    train_clients   Sample clients. Send each its part of the global state and the method's
                    broadcast. The engine trains them. Receive their updates (`exchange.py`).
    finish_round    Reject invalid updates (`validation.py`). Merge the others, and check the state
                    that results (`state_check.py`): if it is not usable, find the responsible
                    updates (`aggregation.py`) and merge again without them. Then end the round.
    merge_updates   Run the stages of the aggregation (`pipeline.py`). If no weights are exchanged,
                    there is nothing to aggregate.
    end_round       Ask clients for collections, such as BatchNorm statistics (`collection.py`).
                    Start to evaluate every size.
                    If clients have models of their own, they are asked for the scores of these
                    instead (`own_models.py`).
                    If the run asks for it, score clients on their own test examples
                    (`client_scores.py`).

Every function takes a server state and returns its results; nothing is changed in place. If a round
is interrupted, the state before it is still whole and can be saved.

`speculation.py` has functions that can take the place of `train_clients` and `finish_round`. They
keep a GPU busy and give the same results; nothing here depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.evaluate import PendingScores
from motley.limits import allocating
from motley.privacy import Accountant, PrivacyLedger
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
from motley.server.validation import NOT_FINITE, UpdateCheck


@dataclass(frozen=True)
class Attempt:
    """A round up to the clients' updates.

    updates: the updates that have the right shapes.
    check: tells which of them are valid, once the device has computed them.
    failures: client -> why it has sent no update, or one of wrong shapes.
    idle: clients that had no batch to train on.
    number: 0, or higher if the round was repeated with other clients.
    was_merged: the updates were merged, but the merged state was not usable.
    """

    clients: list[int]
    updates: Sequence[ClientUpdate]
    check: UpdateCheck
    failures: dict[int, str]
    idle: list[int]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    number: int = 0
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
    ledger: all releases, if the mean of this round is already in the release log.
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
    ledger: PrivacyLedger | None = None


@dataclass(frozen=True)
class Undone:
    """An attempt that did not end the round.

    rejected: client -> why its update does not count.
    problem: what was wrong with the state after the merge; None if too few updates were accepted.
    """

    rejected: dict[int, str]
    problem: str | None = None


#: Samples and trains the clients of an attempt; the number is that of the attempt.
TrainClients = Callable[[RoundContext, ServerState, int, Done], Attempt]
#: Rejects an attempt's invalid updates and ends the round, if enough are left.
FinishRound = Callable[[RoundContext, ServerState, Attempt], Ending | Undone]


def run_round(
    context: RoundContext,
    server: ServerState,
    done: Done,
    train: TrainClients | None = None,
    finish: FinishRound | None = None,
) -> tuple[ServerState, PendingRecord]:
    """Run the round after `server`; return the server state after it, and the round's record.

    While too few updates are valid, or the state after the merge is not usable, the round is
    repeated with other clients. `done` is called with the id of every client that has finished.
    `train` and `finish` take the place of `train_clients` and `finish_round`.
    """
    train = train or train_clients
    finish = finish or finish_round
    failed: list[Attempt] = []
    problem: str | None = None
    while len(failed) < context.attempts:
        attempt = train(context, server, len(failed), done)
        ending = finish(context, server, attempt)
        if isinstance(ending, Ending):
            return record_round(context, failed, attempt, ending)
        problem = ending.problem
        undone = replace(attempt, failures=ending.rejected, was_merged=problem is not None)
        if undone.was_merged and context.release_log is not None:
            note_merge(context.release_log, server.round_number + 1, undone, True)
        failed.append(undone)
    tried = f"round {server.round_number + 1} was tried {context.attempts} times (server.attempts)"
    if problem is not None:
        raise MotleyError(
            f"{tried} and never ended with a usable state. The last time, {problem}, and that was "
            "not due to a few clients. The state before the round is kept. If training diverges, "
            "lower the learning rate; server.max_norm and server.merge limit what clients can do."
        )
    reasons = [f"client {client}: {reason}" for client, reason in failed[-1].rejected.items()]
    message = (
        f"{tried} and never had {context.min_fraction:.0%} of its updates (server.min_fraction). "
        f"The last time: {' '.join(reasons)}"
    )
    if NOT_FINITE in failed[-1].rejected.values():
        message += (
            " If training diverges, lower training.optimizer.lr or set training.max_grad_norm."
        )
    raise MotleyError(message)


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
        number=attempt_number,
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
    ledger = None
    if context.release_log is not None:
        # Before clients are asked for scores of the new model: they receive it.
        number = merged.server.round_number
        ledger = note_merge(context.release_log, number, attempt, bool(excluded))
    ending = end_round(context, merged, attempt.clients, excluded)
    return replace(ending, ledger=ledger)


def enough_updates(context: RoundContext, attempt: Attempt) -> bool:
    """Tell whether a round can end. Clients without examples count as if they had sent updates."""
    return num_dispensable(context, attempt) >= 0


def num_dispensable(context: RoundContext, attempt: Attempt) -> int:
    """Return how many more updates may be left out before the round has too few."""
    sampled = len(attempt.clients)
    # 1e-9: a tenth of 30 clients is 3, whatever the rounding of 0.1 * 30.
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


def note_merge(
    log: ReleaseLog, round_number: int, attempt: Attempt, is_chosen: bool
) -> PrivacyLedger:
    """Account for the merge of an attempt's updates; return all releases so far.

    `is_chosen`: updates were left out because of their effect on the state, or the attempt was
    undone for it. Everyone sees this, and it depends on every update. So those that were left out
    are charged too, also if all clients of a size are among them.
    """
    accepted = [update.client for update in attempt.check.verdict.accepted]
    return log.add_mean(round_number, attempt.number, attempt.clients, accepted, is_chosen)


def count_requests(
    accountant: Accountant, server: ServerState, attempts: Sequence[Attempt]
) -> ReleaseCounter:
    """Count the requests to clients in a round, for runs without a `release_log`."""
    counter = ReleaseCounter(accountant, server.ledger)
    for attempt in attempts:
        counter.add_request(server.round_number, attempt.number, attempt.clients)
        if attempt.was_merged:
            note_merge(counter, server.round_number, attempt, True)
    return counter


def record_round(
    context: RoundContext, failed: Sequence[Attempt], attempt: Attempt, ending: Ending
) -> tuple[ServerState, PendingRecord]:
    """Account for the privacy spent, and assemble the round's record.

    `failed` are the earlier attempts at this round. They cost privacy, time and traffic too.
    """
    server, verdict = ending.server, attempt.check.verdict.without(ending.excluded)
    epsilon: dict[str, float] = {}
    if context.accountant is not None:
        ledger = ending.ledger
        if ledger is None:
            log: ReleaseLog | None = context.release_log
            if log is None:
                log = count_requests(context.accountant, server, [*failed, attempt])
            ledger = note_merge(log, server.round_number, attempt, bool(ending.excluded))
        server = replace(server, ledger=ledger)
        epsilon = context.accountant.epsilon(ledger)
    is_evaluated = context.algorithm.info.is_evaluated(server.round_number)
    attempts = [*failed, attempt]
    seconds: list[Mapping[str, float]] = [each.seconds for each in attempts]
    seconds += [each.check.verdict.seconds for each in attempts]
    seconds.append(ending.seconds)
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
        seconds=add_up(seconds),
        bytes_down=ending.bytes_down + sum(each.bytes_down for each in attempts),
        bytes_up=ending.bytes_up + sum(each.bytes_up for each in attempts),
    )
    pending = PendingRecord(record, ending.evaluation, ending.metrics, ending.client_scores)
    return server, pending
