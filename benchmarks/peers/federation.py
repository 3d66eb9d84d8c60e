"""The federations that Motley and its peers run: data, clients, model, local training, evaluation.

Plain PyTorch and numpy, so that it belongs to none of the libraries under comparison. Every
contender gets the same examples per client, the same initial weights, batch size, epochs, learning
rate and test set. FedAvg throughout; clients have equally many examples, so the weighted and the
plain mean agree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "src/motley/data/datasets/digits.npz"
#: Where models and data are. `compare.py --device` sets the variable for every contender's process.
DEVICE = torch.device(os.environ.get("PEERS_DEVICE", "cpu"))
CLASSES = 10
TEST_EXAMPLES = 360
EVALUATION_BATCH = 120


@dataclass(frozen=True)
class Workload:
    """One federation, and how long it is measured.

    tolerance: largest difference of a contender's final accuracy from the control's. Contenders
        draw other batches, and Flower samples other clients.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    channels: int
    side: int
    clients: int
    clients_per_round: int
    examples_per_client: int
    batch_size: int
    epochs: int
    lr: float
    rounds: int
    repeats: int
    tolerance: float

    @property
    def steps_per_round(self) -> int:
        """Local steps of all clients of a round together. The last batch of an epoch may be short."""
        batches = -(-self.examples_per_client // self.batch_size)
        return self.clients_per_round * self.epochs * batches


@dataclass(frozen=True)
class Data:
    """Examples as float tensors, inputs of shape (examples, channels, height, width)."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


@dataclass
class Outcome:
    """What a contender did. `ends` are the moments (time.monotonic) when rounds were over."""

    ends: list[float] = field(default_factory=list)
    steps: int = 0
    accuracy: float = 0.0

    def round_over(self, accuracy: float) -> None:
        """Note that a round, with its evaluation, is over."""
        self.ends.append(time.monotonic())
        self.accuracy = accuracy


# ---- models


def mlp() -> nn.Module:
    """Return a small MLP for 8x8 pixels: 8,970 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


class Block(nn.Module):
    """The basic block of a ResNet.

    Normalized in groups: libraries disagree about averaging the running statistics of batch norm,
    so that batch norm would not be the same model in all of them.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.GroupNorm(4, channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int = 16) -> nn.Module:
    """Return a ResNet-18 for 32x32 pixels: 3x3 stem, no pooling after it, 16 channels instead of 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.GroupNorm(4, width),
        nn.ReLU(),
    ]
    channels_in = width
    for stage in range(4):
        channels = width * 2**stage
        layers.append(Block(channels_in, channels, stride=1 if stage == 0 else 2))
        layers.append(Block(channels, channels, stride=1))
        channels_in = channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


MLP = Workload(
    name="mlp",
    title="MLP, 50 of 100 clients",
    build=mlp,
    channels=1,
    side=8,
    clients=100,
    clients_per_round=50,
    examples_per_client=14,
    batch_size=10,
    epochs=1,
    lr=0.3,
    rounds=40,
    repeats=3,
    tolerance=0.04,
)
RESNET = Workload(
    name="resnet",
    title="ResNet-18, 4 of 20 clients",
    build=resnet18,
    channels=3,
    side=32,
    clients=20,
    clients_per_round=4,
    examples_per_client=64,
    batch_size=8,
    epochs=4,
    lr=0.02,
    rounds=3,
    repeats=2,
    tolerance=0.15,
)
WORKLOADS = {workload.name: workload for workload in (MLP, RESNET)}


# ---- data and clients


@cache
def data(workload: Workload) -> Data:
    """Return the digits (grey values from 0 to 16), enlarged and repeated over channels.

    They are normalized by their approximate mean (0.3) and standard deviation (0.38).
    """
    with np.load(DIGITS) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    order = np.random.default_rng(0).permutation(len(images))
    inputs = torch.from_numpy(images[order]).float().div(16).sub(0.3).div(0.38).unsqueeze(1)
    if workload.side != inputs.shape[-1]:
        side = (workload.side, workload.side)
        inputs = F.interpolate(inputs, size=side, mode="bilinear", align_corners=False)
    inputs = inputs.repeat(1, workload.channels, 1, 1)
    inputs = inputs.to(DEVICE)
    targets = torch.from_numpy(labels[order]).long().to(DEVICE)
    return Data(
        inputs[TEST_EXAMPLES:],
        targets[TEST_EXAMPLES:],
        inputs[:TEST_EXAMPLES],
        targets[:TEST_EXAMPLES],
    )


def rows_of(workload: Workload, client: int) -> np.ndarray:
    """Return the training examples of a client. Clients have disjoint slices of shuffled data."""
    first = client * workload.examples_per_client
    return np.arange(first, first + workload.examples_per_client)


def examples_of(workload: Workload, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's inputs and targets."""
    rows = torch.from_numpy(rows_of(workload, client)).to(DEVICE)
    examples = data(workload)
    return examples.inputs[rows], examples.targets[rows]


def clients_of_round(workload: Workload, round_number: int) -> list[int]:
    """Sample a round's clients (the first round is 1), keyed by the round as FedML does."""
    random = np.random.RandomState(round_number - 1)
    clients = random.choice(workload.clients, workload.clients_per_round, replace=False)
    return sorted(clients.tolist())


# ---- training and evaluation


def initial_model(workload: Workload) -> nn.Module:
    """Return the model with its initial weights."""
    torch.manual_seed(1)
    return workload.build().to(DEVICE)


def train(model: nn.Module, workload: Workload, inputs: Tensor, targets: Tensor) -> int:
    """Train a model on a client's examples, as plainly as possible; return the number of steps."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, fused=True)
    steps = 0
    for _ in range(workload.epochs):
        for rows in torch.randperm(len(targets), device=DEVICE).split(workload.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            steps += 1
    return steps


@torch.no_grad()
def accuracy(model: nn.Module, workload: Workload) -> float:
    """Return a model's accuracy on the test set."""
    model.eval()
    examples = data(workload)
    correct = 0
    for first in range(0, TEST_EXAMPLES, EVALUATION_BATCH):
        batch = slice(first, first + EVALUATION_BATCH)
        predictions = model(examples.test_inputs[batch]).argmax(1)
        correct += int((predictions == examples.test_targets[batch]).sum())
    return correct / TEST_EXAMPLES


@contextmanager
def counted_steps(outcome: Outcome) -> Iterator[None]:
    """Add the steps of all torch optimizers in this process to an outcome."""

    def count(*_: object) -> None:
        outcome.steps += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()
