"""Measure the speed of a configuration: time per round, time per client step, memory, phases."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from motley.config import Config
from motley.core.errors import MotleyError
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.files import write_atomically
from motley.runs.folder import describe_environment
from motley.server.record import PendingRecord

#: Data sets that can be replaced by random images -> height, width, channels, training images,
#: classes.
SHAPES = {
    "cifar10": (32, 32, 3, 50_000, 10),
    "cifar100": (32, 32, 3, 50_000, 100),
    "cinic10": (32, 32, 3, 90_000, 10),
    "fashion-mnist": (28, 28, 1, 60_000, 10),
    "femnist": (28, 28, 1, 671_585, 62),
    "mnist": (28, 28, 1, 60_000, 10),
    "svhn": (32, 32, 3, 73_257, 10),
}
#: femnist's writers, for the partition "natural".
WRITERS = 3_400


@dataclass(frozen=True)
class Timing:
    """The measurements of one configuration, over several rounds after a warm-up."""

    setting: str
    rounds: int
    #: Median over rounds.
    ms_round: float
    #: Half the distance between the quartiles.
    ms_round_spread: float
    #: Training time divided by the number of steps of all clients.
    ms_client_step: float
    peak_mb: float
    #: Phase -> fraction of the time of a round. "idle" is the time outside all phases.
    share: dict[str, float]
    seconds_first_round: float


def synthetic_dataset(name: str) -> Dataset:
    """Return random images in the shape of a data set. Training on them takes the same time."""
    if name not in SHAPES:
        raise MotleyError(
            f"data.name = {name!r}: --synthetic can only replace {', '.join(SHAPES)}."
        )
    height, width, channels, train_count, classes = SHAPES[name]
    random = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        images = random.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
        writers = np.sort(random.integers(0, WRITERS, count)) if name == "femnist" else None
        return Examples(images, random.integers(0, classes, count), writers)

    return Dataset(name, examples(train_count), examples(10_000), classes)


def measure(
    config: Config, setting: str, rounds: int, warm_up: int, dataset: Dataset | None = None
) -> Timing:
    """Run rounds of a configuration and return their timing."""
    federation = Federation(config, dataset=dataset)
    server = federation.initial_state()
    all_seconds: list[float] = []
    pending: list[PendingRecord] = []
    begin = time.perf_counter()
    for number in range(warm_up + rounds):
        more_rounds = number + 1 < warm_up + rounds
        server, record = federation.queue_round(server, more_rounds=more_rounds)
        # As in a run, the scores of a round are awaited only after the next round has been queued.
        if pending:
            pending[-1].read()
        pending.append(record)
        if number == warm_up + rounds - 1:
            record.read()
        end = time.perf_counter()
        all_seconds.append(end - begin)
        begin = end
    federation.end_workers()  # so that they do not disturb the next measurement
    seconds = all_seconds[warm_up:]
    records = [record.read() for record in pending[warm_up:]]
    phases = [record.seconds for record in records]
    share = {}
    for name in phases[0]:
        share[name] = sum(phase.get(name, 0.0) for phase in phases) / sum(seconds)
    share["idle"] = max(0.0, 1 - sum(share.values()))
    quartiles = statistics.quantiles(seconds, n=4) if rounds > 1 else [seconds[0]] * 3
    train_seconds = sum(phase["train"] for phase in phases)
    return Timing(
        setting=setting,
        rounds=rounds,
        ms_round=1000 * statistics.median(seconds),
        ms_round_spread=500 * (quartiles[2] - quartiles[0]),
        ms_client_step=1000 * train_seconds / sum(record.num_steps for record in records),
        peak_mb=_peak_mb(federation.devices),
        share=share,
        seconds_first_round=all_seconds[0],
    )


def _peak_mb(devices: Sequence[torch.device]) -> float:
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, else in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def save(path: Path, timings: list[Timing]) -> None:
    """Write timings to a file, with the hardware and versions."""
    write_atomically(path, to_json(timings))


def to_json(timings: list[Timing]) -> bytes:
    """Return timings as JSON, with the hardware and versions."""
    content = {
        "environment": describe_environment(),
        "timings": [asdict(timing) for timing in timings],
    }
    return json.dumps(content, indent=2).encode()


def load(path: Path) -> list[Timing]:
    """Read timings from a file."""
    try:
        return [Timing(**timing) for timing in json.loads(path.read_text())["timings"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MotleyError(f"{path} is not a file of timings: {error}.") from None
