"""How fast a configuration runs: milliseconds per round and per client step, memory, and where the time goes."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.config import Config
from motley.core.errors import MotleyError
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.files import write_atomically
from motley.runs.folder import describe_environment

SHAPES = {"cifar10": (32, 32, 3, 50_000), "fashion-mnist": (28, 28, 1, 60_000)}
"""Height, width, channels and training images of data sets that can be stood in for."""


@dataclass(frozen=True)
class Timing:
    """What was measured of one configuration, over several rounds after a warm-up."""

    setting: str
    rounds: int
    ms_round: float
    """Median."""
    ms_round_spread: float
    """Half the distance between the quartiles."""
    ms_client_step: float
    """Training time over the steps of all clients."""
    peak_mb: float
    share: dict[str, float]
    """Share of a round in each phase; idle is what no phase accounts for."""
    seconds_first_round: float


def stand_in(name: str) -> Dataset:
    """Return random images of a data set's shape: as fast to train on as the real ones."""
    if name not in SHAPES:
        raise MotleyError(f"data.name = {name!r}: --synthetic can stand in for {', '.join(SHAPES)}.")
    height, width, channels, count = SHAPES[name]
    numbers = np.random.default_rng(0)

    def examples(size: int) -> Examples:
        images = numbers.integers(0, 256, (size, height, width, channels), dtype=np.uint8)
        return Examples(images, numbers.integers(0, 10, size))

    return Dataset(name, examples(count), examples(10_000), 10)


def measure(config: Config, setting: str, rounds: int, warm_up: int, dataset: Dataset | None = None) -> Timing:
    """Play rounds of a configuration and return what they took."""
    federation = Federation(config, dataset=dataset)
    steps: list[int] = []
    aggregate = federation.method.aggregate

    def counting(server: Any, state: Any, updates: Any) -> Any:
        steps.append(sum(update.num_steps for update in updates))
        return aggregate(server, state, updates)

    federation.method.aggregate = counting  # type: ignore[method-assign]
    server = federation.start()
    totals, phases = [], []
    begin, unsettled = time.perf_counter(), None
    for number in range(warm_up + rounds):
        server, record = federation.advance(server, lambda client: None)
        if unsettled is not None:
            unsettled.settle()
        unsettled = record
        if number == warm_up + rounds - 1:
            record.settle()
        end = time.perf_counter()
        totals.append(end - begin)
        phases.append(record.seconds)
        begin = end
    measured, seconds = totals[warm_up:], phases[warm_up:]
    share = {name: sum(phase.get(name, 0.0) for phase in seconds) / sum(measured) for name in seconds[0]}
    quartiles = statistics.quantiles(measured, n=4) if rounds > 1 else [measured[0]] * 3
    train = sum(phase["train"] for phase in seconds)
    return Timing(
        setting=setting,
        rounds=rounds,
        ms_round=1000 * statistics.median(measured),
        ms_round_spread=500 * (quartiles[2] - quartiles[0]),
        ms_client_step=1000 * train / sum(steps[warm_up:]),
        peak_mb=_peak_mb(federation.devices),
        share={**share, "idle": max(0.0, 1 - sum(share.values()))},
        seconds_first_round=totals[0],
    )


def _peak_mb(devices: Sequence[torch.device]) -> float:
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def save(path: Path, timings: list[Timing]) -> None:
    """Write timings with the hardware and the versions they belong to."""
    write_atomically(path, to_json(timings))


def to_json(timings: list[Timing]) -> bytes:
    """Return timings, with the hardware and the versions they belong to, as the content of a file."""
    content = {"environment": describe_environment(), "timings": [asdict(timing) for timing in timings]}
    return json.dumps(content, indent=2).encode()


def load(path: Path) -> list[Timing]:
    """Read timings."""
    try:
        return [Timing(**timing) for timing in json.loads(path.read_text())["timings"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MotleyError(f"{path} holds no timings: {error}.") from None
