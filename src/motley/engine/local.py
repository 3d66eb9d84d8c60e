"""The local engine: all clients in this process, in slots.

Jobs go to the slots of their size, longest first, and a slot takes its next client as soon as it is
free. All busy slots step in turns. On a GPU each has its own stream, the host only queues work, and
nothing waits until the round's losses are read. There the kernels of the longest jobs go first,
since a round ends when its longest job does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar, TypeAlias

from motley.client.clients import Clients, own_randomness
from motley.client.job import CLIENT_SCORES, Job
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot
from motley.engine.spread import Spread
from motley.engine.stack import Stack, can_stack
from motley.engine.timeline import Timeline
from motley.methods.base import Collection

Queues: TypeAlias = dict[str, deque[tuple[Job, bool]]]
#: Fraction of a round's jobs whose kernels go first, on a GPU.
URGENT = 0.3


class LocalEngine:
    """Runs clients in slots."""

    trusted: ClassVar[bool] = True

    def __init__(self, clients: Clients, slots: int, stack: int = 1) -> None:
        self.clients, self.stack = clients, stack
        self._stacks: dict[str, Stack] = {}
        per_size = slots or (4 if clients.device.type == "cuda" else 1)
        pools = [SlotPool(clients, per_size, where) for where in range(len(clients.devices))]
        self.pool: SlotPool | Spread = Spread(pools) if len(pools) > 1 else pools[0]
        self._pools = pools

    def record(self, timeline: Timeline) -> None:
        """Record in a timeline which client trains in which slot and when."""
        for pool in self._pools:
            pool.timeline = timeline

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        """Train every job's client."""
        waiting = self._queues(jobs)
        busy: list[Slot] = []
        with own_randomness(*self.clients.devices):
            updates = self._side_by_side(waiting, done) if self.stack > 1 else []
            for slot in self.pool:
                slot.follow()
            try:
                while busy or any(waiting.values()):
                    for slot in chain(self._fill_slots(waiting, busy), list(busy)):
                        if slot.advance():
                            busy.remove(slot)
                            updates.append(slot.unload())
                            done(updates[-1].client)
            finally:
                for slot in busy:
                    slot.busy = False
            for slot in self.pool:
                slot.lead()
        return sorted(updates, key=lambda update: update.client)

    def _side_by_side(self, waiting: Queues, done: Done) -> list[ClientUpdate]:
        """Train the jobs that can be stacked, and take them out of the queues."""
        updates = []
        for size in [size for size in waiting if can_stack(self.clients, size)]:
            jobs = [job for job, _ in waiting.pop(size)]
            for first in range(0, len(jobs), self.stack):
                together = jobs[first : first + self.stack]
                stack = self._stack(size, len(together))
                stack.follow()
                updates += stack.train(together)
                stack.lead()
                for job in together:
                    done(job.client)
        return updates

    def _stack(self, size: str, count: int) -> Stack:
        """Return a stack for clients of a size: on a CPU as wide as they need, on a GPU always the
        same.
        """
        width = count if self.clients.device.type == "cpu" else self.stack
        stack = self._stacks.get(size)
        if stack is None or stack.width != width:
            stack = self._stacks[size] = Stack(self.clients, size, width)
        return stack

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for a collection."""
        jobs = [job for job in jobs if self.clients.can_answer(job)]
        own_models = self.clients.method.has_own_models
        with own_randomness(self.clients.device):
            if jobs and jobs[0].collection in CLIENT_SCORES and not own_models:
                return self._client_scores(jobs)
            collections = []
            for job in jobs:
                learner = self.pool.any(job.size).learner
                collections.append(self.clients.collect(learner, job))
            return collections

    def _client_scores(self, jobs: Sequence[Job]) -> list[Collection]:
        """Score clients on their own test examples: one pass for all that received the same state.

        Personalized scores need the training of one client after the other.
        """
        by_state: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            by_state.setdefault((job.size, id(job.state)), []).append(job)
        answers = {}
        for (size, _), same in by_state.items():
            learner = self.pool.any(size).learner
            for answer in self.clients.score_together(learner, same):
                answers[answer.client] = answer
        for job in jobs:
            if job.collection == "personalized-score":
                slot = self.pool.any(job.size)
                answers[job.client] = slot.personalize(job, answers[job.client])
        return [answers[job.client] for job in jobs]

    def save_memory(self, rounds: dict[int, int]) -> None:
        """Write the clients' states."""
        self.clients.memory.save(rounds)

    def forget_memory(self, rounds: dict[int, int]) -> None:
        """Delete the clients' states of rounds before the given ones."""
        self.clients.memory.forget_older(rounds)

    def _queues(self, jobs: Sequence[Job]) -> Queues:
        """Return the jobs of each size that have a step to take, longest first, and whether they
        are urgent.

        A step's duration is roughly proportional to the number of a model's tensors, because each
        has its kernels.
        """
        split = self.clients.method.info.split
        work = {}
        for job in jobs:
            # Not `len(job.state)`, which is 0 for a client with a model of its own.
            tensors = len(split.whole_part(job.size))
            work[job.client] = self.clients.local_steps(job) * tensors
        urgent = URGENT * len(jobs) if self.clients.device.type == "cuda" else 0
        queues: Queues = {}
        for rank, job in enumerate(sorted(jobs, key=lambda job: (-work[job.client], job.client))):
            if work[job.client]:
                queues.setdefault(job.size, deque()).append((job, rank < urgent))
        return queues

    def _fill_slots(self, waiting: Queues, busy: list[Slot]) -> Iterator[Slot]:
        """Give free slots the first waiting jobs of their sizes; yield each slot as soon as it is
        filled.
        """
        for queue in waiting.values():
            while queue and (slot := self.pool.seat(*queue[0])) is not None:
                queue.popleft()
                busy.append(slot)
                yield slot
