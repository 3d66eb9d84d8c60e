"""The slots of a device: created when first needed, up to a number per size, fewer if memory is
short.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from motley.client.clients import Clients
from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.engine.other_device_slot import OtherDeviceSlot
from motley.engine.slots import Slot
from motley.engine.timeline import Timeline

#: A slot has the weights, their gradients, the optimizer's state and the received weights.
COPIES = 4


class SlotPool:
    """The slots of one device, by size."""

    def __init__(self, clients: Clients, per_size: int, where: int = 0) -> None:
        self.clients, self.where, self.device = clients, where, clients.devices[where]
        self.per_size = per_size
        #: How many slots fit on the device; known once one more did not.
        self.most: int | None = None
        self._slots: dict[str, list[Slot]] = {}
        self._bytes: dict[str, int] = {}
        #: Records which client trains in which slot and when, if it is set.
        self.timeline: Timeline | None = None

    def __iter__(self) -> Iterator[Slot]:
        for slots in self._slots.values():
            yield from slots

    def seat(self, job: Job, urgent: bool = False) -> Slot | None:
        """Load a job into a free slot of its size; return None if the job has to wait.

        Urgent jobs get slots whose kernels go first, if there is such a slot or one can be created,
        and other jobs do not. If the device has no memory for a slot, the slot is dropped, and the
        number of slots never exceeds that without it again: idle ones are dropped to make room.
        Which slot a client trains in changes no result.
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

    def make_room(self, size: str, max_bytes: int) -> None:
        """Drop idle slots of other sizes until all slots take at most `max_bytes`, if possible."""
        others = [slot for slot in self if slot.size != size and not slot.busy]
        total = self._slot_bytes(size) + sum(self._slot_bytes(slot.size) for slot in others)
        for slot in others:
            if total > max_bytes:
                total -= self._slot_bytes(slot.size)
                self._drop(slot)

    def _slot_bytes(self, size: str) -> int:
        """Return roughly how much memory a slot of a size takes between two clients."""
        if size not in self._bytes:
            state = self.clients.method.info.split.blueprints[size].module.state_dict()
            self._bytes[size] = COPIES * sum(tensor.nbytes for tensor in state.values())
        of_size = self._slots.get(size, [])
        batches = of_size[0].learner.batches.num_bytes if of_size else 0
        return self._bytes[size] + batches

    def _free(self, size: str, urgent: bool) -> Slot | None:
        slots = self._slots.setdefault(size, [])
        free = sorted(
            (slot for slot in slots if not slot.busy), key=lambda slot: slot.urgent != urgent
        )
        if free and free[0].urgent == urgent:
            return free[0]
        if len(slots) >= self.per_size or not self._has_room():
            return next((slot for slot in free if slot in slots), None)
        try:
            slot = self._make(size, urgent)
        except torch.OutOfMemoryError:
            self._no_more_than(len(list(self)), size)
            return self._free(size, urgent)
        slot.follow()
        slots.append(slot)
        return slot

    def _make(self, size: str, urgent: bool = False) -> Slot:
        slot_class = OtherDeviceSlot if self.where else Slot
        return slot_class(self.clients, size, self.where, urgent)

    def _has_room(self) -> bool:
        """Tell whether one more slot may be created, after dropping an idle one if the device is
        full.
        """
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
            leave_out = (
                f"{self.device} out of engine.device"
                if self.where
                else "the largest size out of model.sizes"
            )
            raise MotleyError(
                f"{self.device} has too little memory for a single client of size {size!r}. "
                f"Lower training.batch_size, or leave {leave_out}."
            )
        if self.most is None:
            warnings.warn(
                f"{self.device} has memory for {count} clients at once; the others wait their "
                "turn.",
                stacklevel=2,
            )
        self.most = count
