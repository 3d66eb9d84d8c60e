"""The local engine: all clients in this process, in slots.

Jobs go to the slots of their size, longest turn first, and a slot takes its next client as soon as it is free. All busy
slots step in turns; on a GPU each has its own stream, the host only queues work, and nothing waits until the round's
losses are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from motley.engine.base import Done, Job, Upload
from motley.engine.clients import Clients, Turn, own_randomness
from motley.engine.slots import Slot
from motley.methods.base import Collection


class LocalEngine:
    """Runs clients in slots."""

    def __init__(self, clients: Clients, slots: int) -> None:
        self.clients = clients
        self.limit = slots or (4 if clients.device.type == "cuda" else 1)
        self._slots: dict[str, list[Slot]] = {}

    def train(self, jobs: Sequence[Job], done: Done) -> list[Upload]:
        """Train every job's client."""
        steps = {job.client: self.clients.turn_steps(job) for job in jobs}
        waiting = [job for job in jobs if steps[job.client]]
        waiting.sort(key=lambda job: (-steps[job.client], job.client))
        turns: list[Turn] = []
        busy: list[Slot] = []
        with own_randomness(self.clients.device):
            self._follow()
            try:
                while waiting or busy:
                    for slot in chain(self._fill_slots(waiting, busy), list(busy)):
                        if slot.advance():
                            busy.remove(slot)
                            turns.append(slot.unload())
                            done(turns[-1].job.client)
            finally:
                for slot in busy:
                    slot.busy = False
            self._lead()
        return self.clients.uploads(turns)

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for the method's collection."""
        with own_randomness(self.clients.device):
            return [self.clients.collect(self._any_slot(job.size).learner, job) for job in jobs]

    def save_memory(self, rounds: dict[int, int]) -> None:
        """Write the clients' memory."""
        self.clients.memory.save(rounds)

    def forget_memory(self, rounds: dict[int, int]) -> None:
        """Delete what clients wrote before the given rounds."""
        self.clients.memory.forget_older(rounds)

    def _fill_slots(self, waiting: list[Job], busy: list[Slot]) -> Iterator[Slot]:
        """Give each free slot the first waiting job of its size; yield each as soon as it is filled."""
        for job in list(waiting):
            slot = self._free_slot(job.size)
            if slot is not None:
                slot.load(job, self.clients.plan(job))
                waiting.remove(job)
                busy.append(slot)
                yield slot

    def _free_slot(self, size: str) -> Slot | None:
        slots = self._slots.setdefault(size, [])
        free = next((slot for slot in slots if not slot.busy), None)
        if free is None and len(slots) < self.limit:
            free = Slot(self.clients, size)
            free.follow()
            slots.append(free)
        return free

    def _any_slot(self, size: str) -> Slot:
        slots = self._slots.setdefault(size, [])
        if not slots:
            slots.append(Slot(self.clients, size))
        return slots[0]

    def _follow(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.follow()

    def _lead(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.lead()
