"""The plain engine: a fresh model and a fresh optimizer for every client, one client after the
other.

Every faster way to run clients is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from motley.client.clients import Clients, own_randomness
from motley.client.job import Job
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.methods.base import Collection


class DebugEngine:
    """Runs clients one at a time, eagerly."""

    trusted: ClassVar[bool] = True

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        """Train every job's client."""
        updates = []
        with own_randomness(self.clients.device):
            for job in jobs:
                plan = self.clients.plan(job)
                if not plan.lengths:
                    continue
                learner = self.clients.learner(job.size)
                job, client_state = self.clients.resume(job)
                self.clients.seat(learner, job, plan, client_state)
                learner.use_generator()
                for length in plan.lengths:
                    learner.seed_step()
                    learner.enter_phase()
                    learner.step(length)
                    learner.num_steps += 1
                updates.append(self.clients.finish(learner))
                done(job.client)
        return sorted(updates, key=lambda update: update.client)

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for a collection."""
        with own_randomness(self.clients.device):
            collections = []
            for job in jobs:
                if self.clients.samples(job.client):
                    learner = self.clients.learner(job.size)
                    collections.append(self.clients.collect(learner, job))
            return collections

    def save_memory(self, rounds: dict[int, int]) -> None:
        """Write the clients' states."""
        self.clients.memory.save(rounds)

    def forget_memory(self, rounds: dict[int, int]) -> None:
        """Delete the clients' states of rounds before the given ones."""
        self.clients.memory.forget_older(rounds)
