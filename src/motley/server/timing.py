"""How long the phases of a round take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class Timer:
    """Measures phases by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block to a phase."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def add_up(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total time of each phase."""
    totals: dict[str, float] = {}
    for seconds in times:
        for phase, value in seconds.items():
            totals[phase] = totals.get(phase, 0.0) + value
    return totals
