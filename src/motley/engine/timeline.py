"""Which client ran where and when: spans of turns in slots, on the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from motley.engine.base import Job

Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class Span:
    """One turn. Seconds are counted from the timeline's beginning."""

    round_number: int
    client: int
    size: str
    slot: int
    start: float
    end: float


class Timeline:
    """Collects turns; on a GPU with events on the slots' streams, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: dict[int, int] = {}
        self._open: dict[int, tuple[Job, Mark]] = {}
        self._closed: list[tuple[Job, int, Mark, Mark]] = []
        self._zero = self._mark()

    def begin(self, slot: object, job: Job) -> None:
        """Note that a job's turn begins in a slot, on the current stream."""
        self._slots.setdefault(id(slot), len(self._slots))
        self._open[id(slot)] = job, self._mark()

    def end(self, slot: object) -> None:
        """Note that the turn in a slot is over, on the current stream."""
        job, start = self._open.pop(id(slot))
        self._closed.append((job, self._slots[id(slot)], start, self._mark()))

    def spans(self) -> list[Span]:
        """Return the turns so far; waits for the device."""
        return [
            Span(job.round_number, job.client, job.size, slot, self._seconds(start), self._seconds(end))
            for job, slot, start, end in self._closed
        ]

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            assert isinstance(self._zero, float)
            return mark - self._zero
        assert not isinstance(self._zero, float)
        mark.synchronize()
        return self._zero.elapsed_time(mark) / 1000


def draw(spans: Sequence[Span], path: Path, rounds: int = 3) -> None:
    """Draw the last rounds: a row a slot, a bar a turn with its client's number, a colour a size."""
    last = max(span.round_number for span in spans)
    shown = [span for span in spans if span.round_number > last - rounds]
    first = min(span.start for span in shown)
    sizes = sorted({span.size for span in shown}, key=lambda size: (len(size), size))
    rows = {slot: row for row, slot in enumerate(sorted({span.slot for span in shown}))}
    figure = Figure(figsize=(12, 1.5 + 0.35 * len(rows)))
    axes = figure.subplots()
    for span in shown:
        left, width = 1000 * (span.start - first), 1000 * (span.end - span.start)
        axes.barh(rows[span.slot], width, left=left, color=f"C{sizes.index(span.size)}", edgecolor="white")
        axes.text(left + width / 2, rows[span.slot], str(span.client), ha="center", va="center", fontsize=7)
    for size in sizes:
        axes.barh(0, 0, color=f"C{sizes.index(size)}", label=size)
    axes.set_yticks(range(len(rows)), [f"slot {slot}" for slot in rows])
    axes.set_xlabel("ms")
    axes.set_title(f"rounds {max(1, last - rounds + 1)} to {last}: clients in slots")
    axes.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
