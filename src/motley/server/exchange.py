"""The exchange with clients: the server sends jobs and receives updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from motley.core.part import Part, size_in_bytes, take
from motley.core.results import require_tensors
from motley.core.update import ClientUpdate
from motley.engine.base import Failure, Job
from motley.server.context import RoundContext
from motley.server.state import ServerState
from motley.server.uplink import on_servers_device
from motley.server.validation import UpdateCheck, payload_error, report_error, shape_error


def make_job(context: RoundContext, server: ServerState, round_number: int, client: int) -> Job:
    """Return the job for one client."""
    size = context.size_of(client, round_number)
    part = context.split.part(size, round_number, client)
    # If no weights are exchanged, a client is sent its size's initial weights, and only until it
    # has a model of its own.
    algorithm = context.algorithm
    broadcast: object = algorithm.broadcast(server.method_state, server.state, round_number, client)
    has_own_model = not context.exchanges_weights and client in server.client_state_rounds
    return Job(
        round_number=round_number,
        client=client,
        size=size,
        state={} if has_own_model else take(server.state, part),
        broadcast=require_tensors(broadcast, f"broadcast of {type(algorithm).__name__}"),
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
        expected = job.state if context.exchanges_weights else {}
        error = shape_error(expected, update.delta)
        if error is None and not context.engine.trusted:
            error = report_error(
                update,
                private=context.accountant is not None,
                max_examples=context.max_examples,
                max_steps=context.max_steps,
            )
        if error:
            rejected[update.client] = error
        else:
            updates.append(complete_update(context, job, update))
    return updates, rejected


def complete_update(context: RoundContext, job: Job, update: ClientUpdate) -> ClientUpdate:
    """Add the server's fields to an update, and the channel noise if there is any.

    Without a delta, an update belongs to no part of the global state.
    """
    part: Part = {}
    if context.exchanges_weights:
        part = context.split.part(job.size, job.round_number, job.client)
    trained = context.split.parameters_of(job.size)
    update = context.uplink.add_noise(job, update, [name for name in job.state if name in trained])
    return replace(
        update,
        received=job.state,
        part=part,
        weight=float(update.num_examples) if context.weigh_by_examples else 1.0,
        size=job.size,
        round_number=job.round_number,
    )


def start_check(
    context: RoundContext, server: ServerState, updates: Sequence[ClientUpdate]
) -> UpdateCheck:
    """Start to check updates.

    Payloads of nodes elsewhere are tried one by one; our own clients are trusted.
    """

    def error(update: ClientUpdate) -> str | None:
        return payload_error(context.algorithm, server, update)

    return UpdateCheck(
        updates,
        losses_are_reported=context.accountant is None,
        payload_error=None if context.engine.trusted else error,
        bounds=None if context.bounds is None else context.bounds.measure(server, updates),
        max_loss=None if context.engine.trusted else context.max_loss,
    )


def bytes_down(jobs: Sequence[Job]) -> int:
    """Return how many bytes clients are sent."""
    return sum(size_in_bytes(job.state) + size_in_bytes(job.broadcast) for job in jobs)


def bytes_up(answers: Sequence[ClientUpdate | Failure]) -> int:
    """Return how many bytes clients sent, encoded as they sent them."""
    updates = [answer for answer in answers if isinstance(answer, ClientUpdate)]
    return sum(size_in_bytes(update.delta) + size_in_bytes(update.payload) for update in updates)
