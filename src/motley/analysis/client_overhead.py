"""What a method costs beside its accuracy: FedIN's Table 2, counted from what really travels and is held."""

from __future__ import annotations

from dataclasses import dataclass

from motley.engine import Upload
from motley.federation import Federation
from motley.splits.part import State


@dataclass(frozen=True)
class Overhead:
    """What clients send and hold; means are over sizes, one client of each."""

    parameters: float
    """Mean number of parameters that a client sends: FedAvg's "Params". Buffers are not counted, as in the paper."""
    message: float
    """Mean number of values that the method adds to them."""
    model_bytes: int
    """The parts of all sizes together, buffers included: FedAvg's "Memory"."""
    method_bytes: float
    """Mean of what a client holds for the method: the message it received, and what it remembers."""


def overhead(federation: Federation) -> Overhead:
    """Let one client of each size take a turn, and count.

    What a client receives is counted in the second round: FedIN's first has no features yet.
    """
    clients = [federation.sizes.index(size) for size in federation.split.sizes]
    server = federation.start()
    jobs = {client: federation.job(server, 1, client) for client in clients}
    uploads = federation.engine.train(list(jobs.values()), lambda client: None)
    updates = [federation.update(jobs[u.client], u) for u in uploads if isinstance(u, Upload)]
    learned = federation.method.learn(server.method, server.state, updates)
    parameters = [{n: u.change[n] for n in federation.split.parameters_of(u.size)} for u in updates]
    received = [federation.method.message(learned, server.state, 2, client) for client in clients]
    remembered = [federation.method.memory(job.size, job.state) for job in jobs.values()]
    return Overhead(
        parameters=sum(map(_numbers, parameters)) / len(clients),
        message=sum(_numbers(update.message) for update in updates) / len(clients),
        model_bytes=sum(_bytes(job.state) for job in jobs.values()),
        method_bytes=sum(map(_bytes, [*received, *remembered])) / len(clients),
    )


def _numbers(state: State) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
