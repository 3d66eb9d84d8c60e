"""One round of federated learning. Read this first.

    run_round       train_clients, then finish_round, then the round's record
    train_clients   Sample clients. Send each its part of the global state and the method's
                    broadcast. The engine trains them. Receive their updates (`exchange.py`).
    finish_round    Reject invalid updates (`validation.py`). End the round with the others.
    end_round       Run the stages of the aggregation (`pipeline.py`). Ask clients for collections,
                    such as BatchNorm statistics (`collection.py`). Start to evaluate every size.
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.evaluate import PendingScores
from motley.limits import allocating
from motley.server.client_scores import PendingClientScores, start_client_scores
from motley.server.collection import run_collections
from motley.server.context import RoundContext
from motley.server.exchange import bytes_down, bytes_up, make_job, receive, start_check
from motley.server.metrics import Metrics, PendingMetrics
from motley.server.pipeline import run_stages
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
    """

    clients: list[int]
    updates: list[ClientUpdate]
    check: UpdateCheck
    failures: dict[int, str]
    idle: list[int]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]

    @property
    def rejected(self) -> dict[int, str]:
        """Client -> why it does not count in the round. Waits for the check."""
        return {**self.failures, **self.check.verdict.rejected}


@dataclass(frozen=True)
class Ending:
    """The rest of a round. The device may still be computing the evaluation and the metrics.

    rejected: client -> why its answer in a collection was rejected.
    """

    server: ServerState
    evaluation: PendingScores | None
    metrics: PendingMetrics
    client_scores: PendingClientScores | None
    rejected: dict[int, str]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]


#: Rejects an attempt's invalid updates and ends the round; None if too few are left.
FinishRound = Callable[[RoundContext, ServerState, Attempt], Ending | None]


def run_round(
    context: RoundContext, server: ServerState, done: Done, finish: FinishRound | None = None
) -> tuple[ServerState, PendingRecord]:
    """Run the round after `server`; return the server state after it, and the round's record.

    While too few updates are valid, the round is repeated with other clients. `done` is called with
    the id of every client that has finished. `finish` takes the place of `finish_round`.
    """
    finish = finish or finish_round
    failed: list[Attempt] = []
    while len(failed) < context.attempts:
        attempt = train_clients(context, server, len(failed), done)
        ending = finish(context, server, attempt)
        if ending is not None:
            return conclude(context, failed, attempt, ending)
        failed.append(attempt)
    reasons = [f"client {client}: {reason}" for client, reason in failed[-1].rejected.items()]
    raise MotleyError(
        f"round {server.round_number + 1} was played {context.attempts} times (server.attempts) "
        f"and never had {context.min_fraction:.0%} of its uploads (server.min_fraction). "
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
        with allocating(f"round {round_number}: training with batches of {context.batch_size}"):
            answers = context.engine.train(jobs, done)
        updates, failures = receive(context, jobs, answers)
        check = start_check(context, server, updates)
    answered = {answer.client for answer in answers}
    return Attempt(
        clients=clients,
        updates=updates,
        check=check,
        failures=failures,
        idle=[client for client in clients if client not in answered],
        bytes_down=bytes_down(jobs),
        bytes_up=bytes_up(answers),
        seconds=timer.seconds,
    )


def finish_round(context: RoundContext, server: ServerState, attempt: Attempt) -> Ending | None:
    """Check the updates, and end the round with the valid ones; None if they are too few."""
    if not enough_updates(context, attempt):
        return None
    return end_round(context, server, attempt.clients, attempt.check.verdict.accepted)


def enough_updates(context: RoundContext, attempt: Attempt) -> bool:
    """Tell whether a round can end. Clients without examples count as if they had sent updates."""
    sampled = len(attempt.clients)
    return sampled - len(attempt.rejected) >= context.min_fraction * sampled


def end_round(
    context: RoundContext,
    server: ServerState,
    clients: Sequence[int],
    updates: Sequence[ClientUpdate],
) -> Ending:
    """Aggregate the updates, collect, and start to evaluate.

    `clients` are all that were sampled.
    """
    timer = Timer()
    metrics: Metrics = {}
    server = replace(server, round_number=server.round_number + 1)
    with timer.phase("merge"):
        if updates:
            server, metrics = run_stages(context.pipeline, server, updates)
            accepted = {update.client: server.round_number for update in updates}
            server = replace(server, client_state_rounds={**server.client_state_rounds, **accepted})
    collected = run_collections(
        context.collections, context.engine, server, clients, context.device
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
        metrics=PendingMetrics({**metrics, **collected.metrics}),
        client_scores=client_scores,
        rejected=rejected,
        bytes_down=collected.bytes_down,
        bytes_up=collected.bytes_up,
        seconds=add_up([timer.seconds, collected.seconds]),
    )


def conclude(
    context: RoundContext, failed: Sequence[Attempt], attempt: Attempt, ending: Ending
) -> tuple[ServerState, PendingRecord]:
    """Account for the privacy spent, and assemble the round's record.

    `failed` are the attempts at the round before the one that has ended. They cost privacy, time
    and traffic too.
    """
    server, verdict = ending.server, attempt.check.verdict
    epsilon: dict[str, float] = {}
    if context.accountant is not None:
        accepted = [update.client for update in verdict.accepted]
        asked_before = [client for earlier in failed for client in earlier.clients]
        ledger = context.accountant.after(server.ledger, attempt.clients, accepted, asked_before)
        server = replace(server, ledger=ledger)
        epsilon = context.accountant.epsilon(ledger)
    attempts = [*failed, attempt]
    seconds = [one.seconds for one in attempts] + [one.check.verdict.seconds for one in attempts]
    record = RoundRecord(
        round_number=server.round_number,
        clients=attempt.clients,
        refused={**ending.rejected, **attempt.rejected},
        repeated=[earlier.rejected for earlier in failed],
        idle=attempt.idle,
        train_loss=verdict.train_loss,
        num_steps=sum(update.num_steps for update in verdict.accepted),
        epsilon=epsilon,
        seconds=add_up([*seconds, ending.seconds]),
        bytes_down=ending.bytes_down + sum(one.bytes_down for one in attempts),
        bytes_up=ending.bytes_up + sum(one.bytes_up for one in attempts),
    )
    pending = PendingRecord(record, ending.evaluation, ending.metrics, ending.client_scores)
    return server, pending
