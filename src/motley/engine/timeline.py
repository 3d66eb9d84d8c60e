"""Which client trained where and when: time spans in slots, on the devices' own clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from motley.client.job import Job
from motley.extras import require


class Place(Protocol):
    """A slot, where clients train one after the other. Slots are told apart by identity."""

    #: Its device, as a position among the devices that clients train on.
    where: int


Mark = float | torch.cuda.Event
#: Round, client and size. Not the job, because that would keep its tensors alive.
Who = tuple[int, int, str]


@dataclass(frozen=True)
class Span:
    """One client's training. Seconds are counted from the timeline's beginning."""

    round_number: int
    client: int
    size: str
    slot: int
    #: Its place among the devices that clients train on.
    device: int
    start: float
    end: float


class Timeline:
    """Collects spans; on a GPU with events on the slots' streams, so that nothing waits."""

    def __init__(self, *devices: torch.device) -> None:
        self.devices = devices
        self._slots: dict[int, int] = {}
        self._open: dict[int, tuple[Who, Mark]] = {}
        self._closed: list[tuple[Who, int, int, Mark, Mark]] = []
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._zeros = [self._mark(where) for where in range(len(devices))]

    def begin(self, slot: Place, job: Job) -> None:
        """Record that a job begins in a slot, on the current stream."""
        self._slots.setdefault(id(slot), len(self._slots))
        self._open[id(slot)] = (job.round_number, job.client, job.size), self._mark(slot.where)

    def end(self, slot: Place) -> None:
        """Record that the job in a slot has ended, on the current stream."""
        who, start = self._open.pop(id(slot))
        self._closed.append((who, self._slots[id(slot)], slot.where, start, self._mark(slot.where)))

    def spans(self) -> list[Span]:
        """Return the spans so far; waits for the device."""
        spans = []
        for who, slot, where, start, end in self._closed:
            seconds = self._seconds(start, where), self._seconds(end, where)
            spans.append(Span(*who, slot, where, *seconds))
        return spans

    def _mark(self, where: int) -> Mark:
        if self.devices[where].type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.devices[where]))
        return event

    def _seconds(self, mark: Mark, where: int) -> float:
        zero = self._zeros[where]
        if isinstance(mark, float):
            assert isinstance(zero, float)
            return mark - zero
        assert not isinstance(zero, float)
        mark.synchronize()
        return zero.elapsed_time(mark) / 1000


def draw(spans: Sequence[Span], path: Path, rounds: int = 3) -> None:
    """Draw the last rounds: one row per slot, one bar per client, one colour per size."""
    last = max(span.round_number for span in spans)
    shown = [span for span in spans if span.round_number > last - rounds]
    first = min(span.start for span in shown)
    sizes = sorted({span.size for span in shown}, key=lambda size: (len(size), size))
    places = sorted({(span.device, span.slot) for span in shown})
    rows = {place: row for row, place in enumerate(places)}
    several = len({device for device, _ in places}) > 1
    require("matplotlib", "a timeline")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 + 0.35 * len(rows)))
    axes = figure.subplots()
    for span in shown:
        left, width = 1000 * (span.start - first), 1000 * (span.end - span.start)
        row = rows[span.device, span.slot]
        axes.barh(row, width, left=left, color=f"C{sizes.index(span.size)}", edgecolor="white")
        axes.text(left + width / 2, row, str(span.client), ha="center", va="center", fontsize=7)
    for size in sizes:
        axes.barh(0, 0, color=f"C{sizes.index(size)}", label=size)
    names = []
    for device, slot in places:
        names.append(f"device {device}, slot {slot}" if several else f"slot {slot}")
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlabel("ms")
    axes.set_title(f"rounds {max(1, last - rounds + 1)} to {last}: clients in slots")
    axes.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
