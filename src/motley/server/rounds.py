"""One round of federated learning. Read this first.

    run_round:      train_clients -> finish_round -> the round's record
    train_clients:  sample clients; send each its part of the global state and the method's
        broadcast; the engine trains them; receive their updates and check their shapes
    finish_round:   reject invalid updates (`validation.py`), then end_round with the others
    end_round:      run the stages of the aggregation pipeline (`pipeline.py`); ask clients for
        collections, such as BatchNorm statistics (`collection.py`); start to evaluate every size

Every function takes a `ServerState` or parts of it and returns what it computes; nothing is changed
in place. If a round is interrupted, the state before it is still whole and can be saved.

On a GPU, `speculation.finish_round` takes the place of `finish_round` and gives the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from motley.core.errors import MotleyError
from motley.core.part import size_in_bytes, take
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Engine, Failure, Job
from motley.evaluate import Evaluation, Evaluator
from motley.limits import allocating
from motley.methods.base import ServerAlgorithm
from motley.privacy import Accountant
from motley.server.collection import CollectionStage, run_collections
from motley.server.metrics import Metrics, PendingMetrics
from motley.server.pipeline import Stage, run_stages
from motley.server.record import PendingRecord, RoundRecord
from motley.server.sampling import Sampler
from motley.server.state import ServerState
from motley.server.timing import Timer, add_up
from motley.server.uplink import Uplink, on_servers_device
from motley.server.validation import UpdateCheck, Verdict, payload_error, shape_error
from motley.splits.base import Split


@dataclass(frozen=True)
class RoundContext:
    """The objects and numbers that a round works with. They stay the same from round to round.

    size_of: (client, round) -> the client's size.
    weigh_by_examples: whether a client counts by its number of examples in the mean; otherwise all
        count equally.
    accountant: computes the privacy spent; None if the run is not private. Private clients do not
        report their loss.
    device: the server's device.
    min_fraction: fraction of a round's clients whose updates must be accepted; with fewer, the
        round is repeated with other clients, up to `attempts` times in all.
    batch_size: the clients' batch size, for error messages.
    """

    engine: Engine
    algorithm: ServerAlgorithm
    split: Split
    size_of: Callable[[int, int], str]
    sample: Sampler
    pipeline: Sequence[Stage]
    collections: Sequence[CollectionStage]
    evaluator: Evaluator
    uplink: Uplink
    weigh_by_examples: bool
    accountant: Accountant | None
    device: torch.device
    min_fraction: float
    attempts: int
    batch_size: int


@dataclass(frozen=True)
class Attempt:
    """A round up to the clients' updates. `check` tells later which updates are valid."""

    clients: list[int]
    updates: list[ClientUpdate]
    check: UpdateCheck
    rejected: dict[int, str]
    idle: list[int]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Ending:
    """The rest of a round:

    the server state after it, and numbers that the device may still be computing.
    """

    server: ServerState
    evaluation: Evaluation | None
    metrics: PendingMetrics
    rejected: dict[int, str]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]


#: Validates an attempt's updates and ends the round with the valid ones; None if they are too few.
FinishRound = Callable[[RoundContext, ServerState, Attempt], tuple[Verdict, Ending | None]]


# ---- the round


def run_round(
    context: RoundContext, server: ServerState, done: Done, finish: FinishRound | None = None
) -> tuple[ServerState, PendingRecord]:
    """Run the round after `server`; return the server state after it, and the round's record.

    `done` is called with each client's id when the client has finished. `finish` replaces
    `finish_round`.
    """
    finish = finish or finish_round
    failed: list[tuple[Attempt, Verdict]] = []
    while len(failed) < context.attempts:
        attempt = train_clients(context, server, len(failed), done)
        verdict, ending = finish(context, server, attempt)
        if ending is not None:
            return conclude(context, failed, attempt, verdict, ending)
        failed.append((attempt, verdict))
    attempt, verdict = failed[-1]
    reasons = [f"client {client}: {why}" for client, why in _rejected(attempt, verdict).items()]
    raise MotleyError(
        f"round {server.round_number + 1} was played {context.attempts} times (server.attempts) "
        f"and never had {context.min_fraction:.0%} of its uploads (server.min_fraction). "
        f"The last time: {' '.join(reasons)}"
    )


def train_clients(context: RoundContext, server: ServerState, number: int, done: Done) -> Attempt:
    """Sample clients, have the engine train them, and receive their updates.

    `number`: 0 for the first attempt.
    """
    timer = Timer()
    with timer.phase("train"):
        round_number = server.round_number + 1
        clients = context.sample(round_number, number)
        jobs = [make_job(context, server, round_number, client) for client in clients]
        with allocating(f"round {round_number}: training with batches of {context.batch_size}"):
            answers = context.engine.train(jobs, done)
        updates, rejected = receive(context, jobs, answers)
        check = start_check(context, server, updates)
    answered = {answer.client for answer in answers}
    sent_back = [answer for answer in answers if isinstance(answer, ClientUpdate)]
    return Attempt(
        clients=clients,
        updates=updates,
        check=check,
        rejected=rejected,
        idle=[client for client in clients if client not in answered],
        bytes_down=_bytes_down(jobs),
        bytes_up=sum(size_in_bytes(u.delta) + size_in_bytes(u.payload) for u in sent_back),
        seconds=timer.seconds,
    )


def finish_round(
    context: RoundContext, server: ServerState, attempt: Attempt
) -> tuple[Verdict, Ending | None]:
    """Check the updates, and end the round with the valid ones; None if they are too few."""
    verdict = attempt.check.verdict()
    if not enough_updates(context, attempt, verdict):
        return verdict, None
    return verdict, end_round(context, server, attempt.clients, verdict.accepted)


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
        pending = PendingMetrics(metrics)
    collected = run_collections(
        context.collections, context.engine, server, clients, context.device
    )
    server = collected.server
    evaluation = None
    if context.algorithm.info.is_evaluated(server.round_number):
        with timer.phase("evaluate"):
            evaluation = context.evaluator.start(server.model, server.round_number)
    return Ending(
        server=server,
        evaluation=evaluation,
        metrics=pending,
        rejected=collected.rejected,
        bytes_down=collected.bytes_down,
        bytes_up=collected.bytes_up,
        seconds=add_up([timer.seconds, collected.seconds]),
    )


def conclude(
    context: RoundContext,
    failed: Sequence[tuple[Attempt, Verdict]],
    attempt: Attempt,
    verdict: Verdict,
    ending: Ending,
) -> tuple[ServerState, PendingRecord]:
    """Account for the privacy spent, and assemble the round's record.

    `failed`: the attempts before this one.
    """
    server, epsilon = ending.server, {}
    if context.accountant is not None:
        accepted = [update.client for update in verdict.accepted]
        asked_before = [client for earlier, _ in failed for client in earlier.clients]
        ledger = context.accountant.after(server.ledger, attempt.clients, accepted, asked_before)
        server = replace(server, ledger=ledger)
        epsilon = context.accountant.epsilon(ledger)
    checks = [its_verdict.seconds for _, its_verdict in failed] + [verdict.seconds]
    parts: list[Attempt | Ending] = [*(earlier for earlier, _ in failed), attempt, ending]
    record = RoundRecord(
        round_number=server.round_number,
        clients=attempt.clients,
        refused={**ending.rejected, **_rejected(attempt, verdict)},
        repeated=[_rejected(earlier, its_verdict) for earlier, its_verdict in failed],
        idle=attempt.idle,
        train_loss=verdict.train_loss,
        num_steps=sum(update.num_steps for update in verdict.accepted),
        epsilon=epsilon,
        seconds=add_up([*(part.seconds for part in parts), *checks]),
        bytes_down=sum(part.bytes_down for part in parts),
        bytes_up=sum(part.bytes_up for part in parts),
    )
    return server, PendingRecord(record, ending.evaluation, ending.metrics)


# ---- its pieces


def make_job(context: RoundContext, server: ServerState, round_number: int, client: int) -> Job:
    """Return what one client is sent."""
    size = context.size_of(client, round_number)
    part = context.split.part(size, round_number, client)
    return Job(
        round_number=round_number,
        client=client,
        size=size,
        state=take(server.state, part),
        broadcast=context.algorithm.broadcast(
            server.method_state, server.state, round_number, client
        ),
        client_state_round=server.client_state_rounds.get(client),
    )


def receive(
    context: RoundContext, jobs: Sequence[Job], answers: Sequence[ClientUpdate | Failure]
) -> tuple[list[ClientUpdate], dict[int, str]]:
    """Return the updates with the shapes that were sent out, and why others are rejected."""
    job_of = {job.client: job for job in jobs}
    updates: list[ClientUpdate] = []
    rejected: dict[int, str] = {}
    for answer in answers:
        if isinstance(answer, Failure):
            rejected[answer.client] = answer.reason
            continue
        job = job_of[answer.client]
        update = context.uplink.decode(job, answer)
        if not context.engine.trusted:
            update = on_servers_device(update, context.device)
        error = shape_error(job.state, update.delta)
        if error:
            rejected[update.client] = error
        else:
            updates.append(complete_update(context, job, update))
    return updates, rejected


def complete_update(context: RoundContext, job: Job, update: ClientUpdate) -> ClientUpdate:
    """Add what the server knows about the client, and the channel noise if there is any."""
    trained = context.split.parameters_of(job.size)
    update = context.uplink.add_noise(job, update, [name for name in job.state if name in trained])
    return replace(
        update,
        part=context.split.part(job.size, job.round_number, job.client),
        weight=float(update.num_examples) if context.weigh_by_examples else 1.0,
        size=job.size,
        round_number=job.round_number,
    )


def start_check(
    context: RoundContext, server: ServerState, updates: Sequence[ClientUpdate]
) -> UpdateCheck:
    """Start to check updates.

    Payloads of nodes elsewhere are tried one by one; those of our own clients are not.
    """

    def error(update: ClientUpdate) -> str | None:
        return payload_error(context.algorithm, server, update)

    return UpdateCheck(
        updates,
        losses_are_reported=context.accountant is None,
        payload_error=None if context.engine.trusted else error,
    )


def enough_updates(context: RoundContext, attempt: Attempt, verdict: Verdict) -> bool:
    """Tell whether the round can end.

    A client without examples counts as if it had sent a valid update.
    """
    sampled = len(attempt.clients)
    return sampled - len(_rejected(attempt, verdict)) >= context.min_fraction * sampled


def _rejected(attempt: Attempt, verdict: Verdict) -> dict[int, str]:
    return {**attempt.rejected, **verdict.rejected}


def _bytes_down(jobs: Sequence[Job]) -> int:
    return sum(size_in_bytes(job.state) + size_in_bytes(job.broadcast) for job in jobs)
