"""The plain engine: a fresh model and a fresh optimizer for every client, one client after the
other.

Every faster way to run clients is tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from motley.client.clients import Clients, own_randomness
from motley.client.job import Job
from motley.client.learner import Learner
from motley.client.training import Plan
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
                updates.append(self.clients.finish(self._train(job, plan)))
                done(job.client)
        return sorted(updates, key=lambda update: update.client)

    def _train(self, job: Job, plan: Plan) -> Learner:
        """Return a fresh learner after all steps of a plan."""
        learner = self.clients.learner(job.size)
        job, client_state = self.clients.states.resume(job)
        self.clients.seat(learner, job, plan, client_state)
        learner.use_generator()
        for length in plan.lengths:
            learner.seed_step()
            learner.enter_phase()
            learner.step(length)
            learner.num_steps += 1
        return learner

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for a collection."""
        with own_randomness(self.clients.device):
            collections = []
            for job in jobs:
                if not self.clients.can_answer(job):
                    continue
                answer = self.clients.collect(self.clients.learner(job.size), job)
                if job.collection == "personalized-score":
                    answer = self._personalize(job, answer)
                collections.append(answer)
            return collections

    def _personalize(self, job: Job, answer: Collection) -> Collection:
        plan = self.clients.plan(job)
        if not plan.lengths:
            return self.clients.add_same_score(answer)
        return self.clients.add_personalized(answer, self._train(job, plan))

    def save_client_states(self, rounds: Mapping[int, int]) -> None:
        """Write the clients' states."""
        self.clients.states.store.save(rounds)

    def forget_client_states(self, rounds: Mapping[int, int]) -> None:
        """Delete the clients' states of rounds before the given ones."""
        self.clients.states.store.forget_older(rounds)
