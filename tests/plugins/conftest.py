"""A tiny package of a user's own: one of everything that a name can stand for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CODE = '''"""A user's own things."""

import numpy as np
import torch
from torch import nn

import motley
from motley.data import Dataset, Examples, Partition, load_dataset


class PullSettings(motley.MethodSettings):
    """A setting of the method."""

    strength: float = 0.1
    """How hard clients are pulled back."""


class PullClient(motley.ClientAlgorithm):
    def after_backward(self, step):
        for name, gradient in step.grads.items():
            gradient.add_(step.params[name] - step.received[name], alpha=self.settings.strength)


class Pull(motley.Method):
    """A proximal term, by hand."""

    Settings = PullSettings
    Client = PullClient
    requirements = motley.Requirements(own_training=True)


class Net(nn.Module):
    def __init__(self, inputs, hidden, depth, num_classes):
        super().__init__()
        self.stem = nn.Linear(inputs, hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = self.stem(x.flatten(1)).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def _inputs(input_shape):
    return int(np.prod(tuple(input_shape)))


def small(input_shape, num_classes, hidden=16):
    return Net(_inputs(input_shape), hidden, 1, num_classes)


def large(input_shape, num_classes, hidden=16):
    return Net(_inputs(input_shape), hidden, 2, num_classes)


class Halves(motley.Split):
    """The stem is shared, everything else belongs to one size."""

    def global_name(self, size, name):
        return name if name.startswith("stem") else f"{size}/{name}"


class Stripes(motley.PartitionSettings):
    """Every client gets each n-th example, after `skip` examples that nobody gets."""

    skip: int = 0

    def split(self, labels, clients, seed):
        rows = [np.arange(self.skip + client, len(labels), clients) for client in range(clients)]
        offsets = np.cumsum([0, *map(len, rows)])
        return Partition(np.concatenate(rows).astype(np.int64), offsets.astype(np.int64))


class Plain(torch.optim.Optimizer):
    """Gradient descent that counts its steps in Python, and slows down."""

    def __init__(self, params, lr=0.05, slower=0.5):
        super().__init__(params, {"lr": lr, "slower": slower})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                rate = group["lr"] / (1 + group["slower"] * state["steps"])
                parameter.sub_(parameter.grad, alpha=rate)


class SignStep(motley.ServerOptimizerSettings):
    """The sign of a moving average of deltas."""

    lr: float = 0.001
    beta: float = 0.5

    def initial_moments(self):
        return {"mean": 0.0}

    def step(self, gradients, moments):
        pairs = zip(moments["mean"], gradients, strict=True)
        means = [self.beta * mean + (1 - self.beta) * gradient for mean, gradient in pairs]
        return [self.lr * mean.sign() for mean in means], {"mean": means}


class ClipSettings(motley.StageSettings):
    max_norm: float = 1.0


class Clip(motley.ServerStage):
    """Clip the norm of the averaged delta."""

    Settings = ClipSettings

    def __call__(self, server, aggregate, updates):
        delta = dict(aggregate.delta)
        names = [name for name in delta if name in self.split.parameters]
        norm = torch.nn.utils.get_total_norm([delta[name] for name in names])
        for name in names:
            delta[name] = delta[name] * (self.settings.max_norm / norm).clamp(max=1.0)
        return motley.StageResult(server, aggregate.with_delta(delta), {"norm": norm})


def few_digits():
    digits = load_dataset("digits")
    train = Examples(digits.train.inputs[:300], digits.train.targets[:300])
    test = Examples(digits.test.inputs[:100], digits.test.targets[:100])
    return Dataset("few digits", train, test, 10)
'''

CONFIG = """
seed = 3
[data]
name = "mine:few_digits"
[data.partition]
name = "mine:Stripes"
[model]
sizes = ["mine:small", "mine:large"]
[split]
name = "depth"
[federation]
clients = 4
clients_per_round = 2
[training]
rounds = 3
batch_size = 16
[training.optimizer]
name = "mine:Plain"
[method]
name = "mine:Pull"
strength = 0.2
[server.optimizer]
name = "mine:SignStep"
[[server.stages]]
name = "mine:Clip"
before = "optimizer"
max_norm = 0.5
[run]
checkpoint_every = 1
tensorboard = false
"""


@pytest.fixture
def forget_modules() -> Iterator[None]:
    """Restore sys.path and forget a test's modules, so that the next one may have others."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest" in file and "site-packages" not in file:
            del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, forget_modules: None) -> Path:
    """Return a folder with the user's module and a configuration that uses all of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def importable(project: Path) -> Path:
    """Return the same folder, on sys.path."""
    sys.path.append(str(project))
    return project


Write = Callable[[str, str], Path]
