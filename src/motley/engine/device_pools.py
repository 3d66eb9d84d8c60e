"""Slots on several devices: one pool per device, with the interface of a single pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from motley.client.job import Job
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot


class DevicePools:
    """Pools of several devices, the home device's first."""

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        self.pools = pools

    def __iter__(self) -> Iterator[Slot]:
        for pool in self.pools:
            yield from pool

    def seat(self, job: Job, urgent: bool = False) -> Slot | None:
        """Load a job on the device with the fewest steps to go that has a free slot of its size.

        Steps to go are those that the host has yet to queue. Jobs come longest first, one size
        after the other, so every size is spread evenly over the devices, whatever its steps cost.
        """
        for pool in sorted(self.pools, key=steps_to_go):
            slot = pool.seat(job, urgent)
            if slot is not None:
                return slot
        return None

    def any(self, size: str) -> Slot:
        """Return a slot of a size on the home device, for work outside of training."""
        return self.pools[0].any(size)


def steps_to_go(pool: SlotPool) -> int:
    """Return the steps that a pool's busy slots have yet to take."""
    return sum(len(slot.learner.lengths) - slot.learner.num_steps for slot in pool if slot.busy)
