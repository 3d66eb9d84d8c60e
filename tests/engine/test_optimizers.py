"""The CPU optimizers against those of torch, and what they leave unimported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from motley.client.training import AdamSettings, OptimizerSettings, SGDSettings, reset

SETTINGS = {
    "adam": AdamSettings(name="adam", lr=0.01, betas=(0.8, 0.95)),
    "adam with decay": AdamSettings(name="adam", weight_decay=0.1),
    "adamw": AdamSettings(name="adamw", weight_decay=0.1),
    "sgd": SGDSettings(lr=0.1),
    "sgd with decay": SGDSettings(weight_decay=0.1),
    "sgd with momentum": SGDSettings(momentum=0.9, weight_decay=0.01),
}


def torch_optimizer(settings: OptimizerSettings, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return torch's own optimizer with these settings."""
    shared = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **shared)
    build = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return build(parameters, betas=settings.betas, **shared)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))


def gradients(model: nn.Module, step: int) -> None:
    """Give every parameter a new gradient, and in one step none to the first one."""
    numbers = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=numbers)
    if step == 3:
        next(model.parameters()).grad = None


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps_are_those_of_torch(settings: OptimizerSettings) -> None:
    ours, theirs = network(), network()
    optimizer = settings.build(ours.parameters(), torch.device("cpu"))
    reference = torch_optimizer(settings, list(theirs.parameters()))
    assert not isinstance(optimizer, torch.optim.Optimizer)
    for step in range(6):
        if step == 4:
            reset(optimizer, 0.02)
            reset(reference, 0.02)
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        reference.step()
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert own.equal(other)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_parameters_of_several_types_are_left_to_torch() -> None:
    parameters = [
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.float64, requires_grad=True),
    ]
    optimizer = AdamSettings().build(parameters, torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.Adam)


def test_a_federation_on_a_cpu_does_not_import_torchs_compiler() -> None:
    """It takes more than a second and 70 MB."""
    program = """
import sys
from motley.federation import Federation
from tests.conftest import tiny_config
federation = Federation(tiny_config("training.rounds=1"))
federation.run_round(federation.initial_state())
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
