"""Flat weights and low-precision copies against plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from motley.engine.weights import FlatWeights, Weights
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings
from motley.models.vit import ViTSettings
from motley.splits.part import State

IMAGE = ImageShape(3, 16, 16)
KINDS: list[type[Weights]] = [Weights, FlatWeights]


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "vit":
        return MODELS["vit2"].build(ViTSettings(patch=8, dim=32, heads=2), IMAGE, 10)
    return MODELS["resnet10"].build(ResNetSettings(width=0.125), IMAGE, 10)


def train(model: nn.Module, weights: Weights, steps: int, optimizer: type[torch.optim.Optimizer]) -> State:
    """Take steps the way a method does, with corrections of gradients and weights on the way."""
    steppers = optimizer(weights.trained, lr=0.01)  # type: ignore[call-arg]
    numbers = torch.Generator().manual_seed(1)
    dtype = next(p.dtype for n, p in model.named_parameters() if n.endswith("weight"))
    for _ in range(steps):
        images = torch.randn(8, *IMAGE, generator=numbers)
        labels = torch.randint(0, 10, (8,), generator=numbers)
        loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
        weights.backward(loss)
        for master in weights.masters.values():
            assert master.grad is not None
            master.grad.add_(master.detach(), alpha=0.1)
        steppers.step()
        with torch.no_grad():
            for master in weights.masters.values():
                master.mul_(0.999)
        weights.publish()
    return {name: master.detach().clone() for name, master in weights.masters.items()}


@pytest.mark.parametrize("family", ["resnet", "vit"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flat_weights_train_like_plain_ones(
    family: str, optimizer: type[torch.optim.Optimizer], precision: str
) -> None:
    model = build(family)
    ends = []
    for kind in KINDS:
        own = copy.deepcopy(model)
        ends.append(train(own, kind(own, precision), 3, optimizer))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_copies_follow_their_masters(kind: type[Weights]) -> None:
    model = build("resnet")
    weights = kind(model, "bf16")
    train(model, weights, 2, torch.optim.SGD)
    for name, parameter in model.named_parameters():
        master = weights.masters[name]
        assert master.dtype == torch.float32
        assert parameter.dtype == (torch.float32 if "bn" in name or "downsample.1" in name else torch.bfloat16)
        assert torch.equal(parameter.detach(), master.detach().to(parameter.dtype))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_flat_weights_keep_values_names_and_layout(layout: torch.memory_format) -> None:
    model = build("resnet").to(memory_format=layout)  # type: ignore[call-overload]
    before = {name: (p.detach().clone(), p.stride()) for name, p in model.named_parameters()}
    weights = FlatWeights(model, "fp32")
    assert list(weights.masters) == list(before)
    for name, parameter in model.named_parameters():
        assert parameter is weights.masters[name]
        assert torch.equal(parameter.detach(), before[name][0]) and parameter.stride() == before[name][1]
    (flat,) = weights.trained
    assert flat.numel() == sum(tensor.numel() for tensor, _ in before.values())
    flat.data.fill_(3.0)
    assert all(bool((p == 3).all()) for p in model.parameters())


def test_a_parameter_without_gradient_gets_zero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Two()
    weights = FlatWeights(model, "fp32")
    weights.backward(model(torch.ones(1, 2)).sum())
    gradient = weights.masters["unused.weight"].grad
    assert gradient is not None and gradient.abs().sum() == 0
