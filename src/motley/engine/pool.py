"""The slots of a device: made when they are first needed, up to a number a size, and fewer where memory is short."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from motley.client.clients import Clients
from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.engine.away import AwaySlot
from motley.engine.slots import Slot
from motley.engine.timeline import Timeline


class SlotPool:
    """The slots of one device, by size."""

    def __init__(self, clients: Clients, a_size: int, where: int = 0) -> None:
        self.clients, self.where, self.device = clients, where, clients.devices[where]
        self.a_size = a_size
        self.most: int | None = None
        """How many slots fit on the device; known once one more did not."""
        self._slots: dict[str, list[Slot]] = {}
        #: Notes who trains in which slot and when, if it is set.
        self.timeline: Timeline | None = None

    def __iter__(self) -> Iterator[Slot]:
        for slots in self._slots.values():
            yield from slots

    def seat(self, job: Job, urgent: bool = False) -> Slot | None:
        """Start a job's turn in a free slot of its size; None where the job has to wait.

        An urgent job gets a slot whose kernels go first, where there is one or one can be made, and no other job does.
        A slot for which the device has no memory is given up, and from then on there are no more slots than there were
        without it: others are emptied to make room. Who trains where changes no result.
        """
        slot = self._free(job.size, urgent)
        if slot is None:
            return None
        slot.timeline = self.timeline
        try:
            slot.load(job, self.clients.plan(job))
        except torch.OutOfMemoryError:
            self._drop(slot)
            self._no_more_than(len(list(self)), job.size)
            return self.seat(job, urgent)
        return slot

    def any(self, size: str) -> Slot:
        """Return a slot of a size, busy or not, for work outside of training."""
        slots = self._slots.setdefault(size, [])
        if not slots:
            slots.append(self._make(size))
        return slots[0]

    def _free(self, size: str, urgent: bool) -> Slot | None:
        slots = self._slots.setdefault(size, [])
        free = sorted((slot for slot in slots if not slot.busy), key=lambda slot: slot.urgent != urgent)
        if free and free[0].urgent == urgent:
            return free[0]
        if len(slots) >= self.a_size or not self._has_room():
            return next((slot for slot in free if slot in slots), None)
        try:
            made = self._make(size, urgent)
        except torch.OutOfMemoryError:
            self._no_more_than(len(list(self)), size)
            return self._free(size, urgent)
        made.follow()
        slots.append(made)
        return made

    def _make(self, size: str, urgent: bool = False) -> Slot:
        kind = AwaySlot if self.where else Slot
        return kind(self.clients, size, self.where, urgent)

    def _has_room(self) -> bool:
        """Tell whether one more slot may be made, after emptying an idle one where the device is full."""
        if self.most is None or len(list(self)) < self.most:
            return True
        idle = next((slot for slot in self if not slot.busy), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _drop(self, slot: Slot) -> None:
        self._slots[slot.size].remove(slot)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _no_more_than(self, count: int, size: str) -> None:
        if count == 0:
            leave_out = f"{self.device} out of engine.device" if self.where else "the largest size out of model.sizes"
            raise MotleyError(
                f"{self.device} has too little memory for a single client of size {size!r}. "
                f"Lower training.batch_size, or leave {leave_out}."
            )
        if self.most is None:
            warnings.warn(
                f"{self.device} has memory for {count} clients at once; the others wait their turn.",
                stacklevel=2,
            )
        self.most = count
