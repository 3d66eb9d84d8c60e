"""What Motley's engine costs on a CPU, beside a training loop written by hand. Run it from the repository:

    OMP_NUM_THREADS=1 python benchmarks/cpu_overhead.py [--json FILE] [--rounds N] [--only NAME]

Both do the same rounds of FedAvg in one process, in turns: the same clients, batches, steps and weights. The loop uses
plain torch, reads its batches from one tensor that is transformed beforehand, and averages at the end of a round;
Motley plays its rounds without evaluation. Both begin a round with the same state, and the run fails where they end it
with different weights. (From round to round Adam would make of a last bit another model.) Every second round the other
one goes first. Printed are the median seconds per round, and the median and the middle half of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from report import arguments, machine, report
from torch import Tensor
from torch.nn import functional as F

from motley.config import Config, load_config
from motley.core.randomness import generator
from motley.federation import Federation

TOLERANCE = 1e-4
"""Largest difference of any weight after a round."""
NEVER = 10**9
Played = TypeVar("Played")


@dataclass(frozen=True)
class Setting:
    """A federation, and how many rounds of it are played."""

    name: str
    rounds: int
    overrides: tuple[str, ...]

    @property
    def config(self) -> Config:
        """The quickstart federation without what a plain loop does not have: sizes, averages, evaluations."""
        plain = (
            "split.name=homogeneous",
            "split.normalization_statistics=shared",
            "server.ema_decay=0",
            "data.partition.name=iid",
            f"training.rounds={NEVER}",
            f"evaluation.every={NEVER}",
            "engine.device=cpu",
        )
        return load_config(overrides=[*plain, *self.overrides])


SETTINGS = (
    Setting(
        "MLP, 50 of 100 clients, 5 epochs, SGD",
        60,
        (
            "model.sizes=['mlp2']",
            "data.transform.resize=8",
            "federation.clients=100",
            "federation.clients_per_round=50",
            "training.epochs=5",
            "training.batch_size=10",
            "training.optimizer.name=sgd",
            "training.optimizer.lr=0.1",
        ),
    ),
    Setting(
        "ResNet-10 width 1/16, 10 of 20 clients, 5 epochs, Adam",
        30,
        ("model.sizes=['resnet10']", "model.resnet.width=0.0625"),
    ),
    Setting(
        "ResNet-18 width 1/4, 10 of 20 clients, 1 epoch, Adam",
        30,
        ("model.sizes=['resnet18']", "training.epochs=1"),
    ),
)


class HandWritten:
    """FedAvg as one would write it down for this model and this data."""

    def __init__(self, federation: Federation) -> None:
        config = federation.config
        self.training, self.seed = config.training, config.seed
        self.sample, self.partition = federation.sample, federation.partition
        self.numerics = federation.numerics
        self.model = federation.split.build(config.model.sizes[0]).train()
        side = config.data.transform.resize
        images = (
            torch.from_numpy(federation.dataset.train.inputs)
            .permute(0, 3, 1, 2)
            .float()
            .div(255)
            .contiguous()
        )
        self.images = (
            images
            if images.shape[-1] == side
            else F.interpolate(images, size=(side, side), mode="bilinear")
        )
        self.labels = torch.from_numpy(federation.dataset.train.targets)

    def play(self, state: dict[str, Tensor], round_number: int) -> dict[str, Tensor]:
        """Return the global state after a round."""
        total = {
            name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in state.items()
        }
        clients = self.sample(round_number)
        with self.numerics():  # as many threads as Motley has
            for client in clients:
                self.model.load_state_dict(state)
                self.train(round_number, client)
                for name, tensor in self.model.state_dict().items():
                    total[name] += tensor
        return {
            name: (total[name] / len(clients)).to(tensor.dtype) for name, tensor in state.items()
        }

    def train(self, round_number: int, client: int) -> float:
        """Train the model on a client's examples; return its mean loss."""
        optimizer, losses = self.optimizer(), []
        for rows in self.batches(round_number, client):
            images, labels = self.images[rows], self.labels[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return statistics.fmean(losses)

    def batches(self, round_number: int, client: int) -> Iterator[Tensor]:
        """Yield the examples of each step: the client's, in a new order every epoch."""
        mine, random = (
            self.partition.of(client),
            generator(self.seed, "batches", round_number, client),
        )
        for _ in range(int(self.training.epochs)):
            yield from torch.from_numpy(random.permutation(mine)).split(self.training.batch_size)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a fresh optimiser."""
        settings = self.training.optimizer
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[settings.name]
        return kind(self.model.parameters(), lr=settings.lr, fused=True)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two states."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def timed(play: Callable[[], Played]) -> tuple[Played, float]:
    """Return what a round gives and how long it takes."""
    begin = time.perf_counter()
    played = play()
    return played, time.perf_counter() - begin


def measure(setting: Setting, rounds: int) -> dict[str, str | int | float]:
    """Play both in turns, a round at a time and one more to warm up, and compare seconds and weights."""
    federation = Federation(setting.config)
    by_hand = HandWritten(federation)
    server, gap = federation.initial_state(), 0.0
    seconds = np.zeros((rounds + 1, 2))
    for number in range(rounds + 1):
        one = partial(by_hand.play, server.state, number + 1)
        other = partial(federation.run_round, server)
        if number % 2:
            (server, _), seconds[number, 1] = timed(other)
            state, seconds[number, 0] = timed(one)
        else:
            state, seconds[number, 0] = timed(one)
            (server, _), seconds[number, 1] = timed(other)
        gap = max(gap, difference(state, server.state))
        assert gap <= TOLERANCE, (
            f"{setting.name}: the weights differ by {gap} after round {number + 1}"
        )
    hand, motley = (1000 * np.median(seconds[1:], axis=0)).tolist()
    low, ratio, high = np.quantile(seconds[1:, 1] / seconds[1:, 0], (0.25, 0.5, 0.75)).tolist()
    return {
        "setting": setting.name,
        "rounds": rounds,
        "by hand, ms": hand,
        "Motley, ms": motley,
        "ratio": ratio,
        "middle half": f"{low:.3f} to {high:.3f}",
        "weights differ by": f"{gap:.0e}",
    }


def main() -> None:
    """Measure every setting."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=0, help="timed rounds of each setting (default: as is useful)"
    )
    parser.add_argument("--only", default="", help="settings whose name begins with this")
    options = parser.parse_args()
    chosen = [setting for setting in SETTINGS if setting.name.startswith(options.only)]
    about = machine("torch", "numpy", "motleyfl")
    report(
        [measure(setting, options.rounds or setting.rounds) for setting in chosen],
        about,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
