"""Rounds and single turns of a small federation, for tests that look into a method."""

from __future__ import annotations

import torch

from motley.client.job import Job
from motley.client.learner import Learner
from motley.core.part import State
from motley.federation import Federation
from motley.server.state import ServerState
from tests.conftest import tiny_config

PLAIN = (
    "training.batch_size=16",
    "training.epochs=0.3",
    "training.rounds=9",
    "evaluation.every=9",
    "server.ema_decay=0",
    "split.normalization_statistics=shared",
)
SGD = ("training.optimizer={name='sgd', lr=0.05}",)


def federation_of(*overrides: str, name: str) -> Federation:
    """Return a federation of a method."""
    return Federation(tiny_config(*PLAIN, f"method.name={name}", *overrides))


def after(rounds: int, *overrides: str, name: str) -> tuple[Federation, ServerState]:
    """Return a federation of a method, and its server after some rounds in which nobody was refused."""
    federation = federation_of(*overrides, name=name)
    server = federation.initial_state()
    for _ in range(rounds):
        server, record = federation.run_round(server)
        assert not record.refused
    return federation, server


def same_bits(one: State, other: State) -> bool:
    """Tell whether two states are one."""
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def seated(federation: Federation, job: Job) -> Learner:
    """Return a learner with a job's client in it, before its first step."""
    clients = federation.engine.clients  # type: ignore[attr-defined]
    learner: Learner = clients.learner(job.size)
    job, client_state = clients.states.resume(job)
    clients.seat(learner, job, clients.plan(job), client_state)
    return learner


def jobs_of(federation: Federation, server: ServerState) -> list[Job]:
    """Return the jobs of the round after a server's."""
    number = server.round_number + 1
    return [federation.job(server, number, client) for client in federation.sample(number)]


def sections_of(server: ServerState) -> dict[str, State]:
    """Return the parts of a server state that advance with training, each a flat mapping of tensors."""
    return {
        "state": server.state,
        "method": server.method_state,
        "optimizer": server.stage_states.get("optimizer", {}),
    }
