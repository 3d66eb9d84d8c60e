"""Slots spread over several devices: a pool a device, behind the face of a single pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from motley.client.job import Job
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot


class Spread:
    """Pools of several devices, the home device's first."""

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        self.pools = pools

    def __iter__(self) -> Iterator[Slot]:
        for pool in self.pools:
            yield from pool

    def seat(self, job: Job, urgent: bool = False) -> Slot | None:
        """Start a job's turn on the device with the fewest steps to go that has a free slot of its size.

        Steps to go are those that the host has yet to queue. Jobs come longest first, a size after the other, so every
        size is dealt evenly over the devices, whatever a step of it costs.
        """
        seated = (pool.seat(job, urgent) for pool in sorted(self.pools, key=steps_to_go))
        return next((slot for slot in seated if slot is not None), None)

    def any(self, size: str) -> Slot:
        """Return a slot of a size on the home device, for work outside of training."""
        return self.pools[0].any(size)


def steps_to_go(pool: SlotPool) -> int:
    """Return the steps that a pool's busy slots have yet to take."""
    return sum(len(slot.learner.lengths) - slot.learner.num_steps for slot in pool if slot.busy)
