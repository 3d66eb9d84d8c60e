"""A model without the taps that only see padding is the same function and learns the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.core.randomness import torch_seed
from motley.federation import Federation
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings
from motley.models.taps import crop_taps
from tests.conftest import tiny_config

IMAGE = ImageShape(3, 32, 32)


def build(size: str, trim: bool) -> nn.Module:
    with torch_seed(1, "test"):
        settings = ResNetSettings(width=0.0625, trim_dead_taps=trim)
        return MODELS[size].make(settings, IMAGE, 10)


@pytest.mark.parametrize(
    ("size", "left"), [("resnet10", 2_158_410), ("resnet26", 6_311_242)]
)  # 17,452,362 - 8/9 of five 512x512x3x3 - 5/9 of one 512x256x3x3 for resnet26
def test_how_many_weights_are_left(size: str, left: int) -> None:
    with torch.device("meta"):
        model = MODELS[size].make(ResNetSettings(trim_dead_taps=True), IMAGE, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == left


@pytest.mark.parametrize("size", ["resnet14", "resnet50"])
def test_outputs_and_gradients_are_the_same(size: str) -> None:
    whole, cropped = build(size, trim=False), build(size, trim=True)
    images = torch.randn(8, 3, 32, 32)
    for model in (whole, cropped):
        model(images).square().sum().backward()
    assert torch.allclose(whole(images), cropped(images), atol=1e-5)
    kept = dict(cropped.named_parameters())
    fewer = 0
    for name, parameter in whole.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and kept[name].grad is not None
        if parameter.shape != kept[name].shape:
            fewer += 1
            height, width = kept[name].shape[2:]
            inside = gradient[:, :, 1 : 1 + height, 1 : 1 + width]
            assert gradient.abs().sum() == pytest.approx(
                inside.abs().sum().item(), rel=1e-5
            )  # all others are zero
            gradient = inside
        assert float((gradient - kept[name].grad).norm() / gradient.norm()) < 1e-4
    assert fewer > 0


def test_a_federation_learns_the_same_with_inco() -> None:
    ends = {}
    for trim in (False, True):
        federation = Federation(
            tiny_config(
                f"model.resnet.trim_dead_taps={str(trim).lower()}",
                "server.inco.variant=official",
                "training.steps=2",
                "training.rounds=1",
            )
        )
        server, record = federation.run_round(federation.initial_state())
        ends[trim] = (
            server.state,
            record.scores["resnet18"].loss,
            record.train_loss,
            record.bytes_up,
        )
    assert ends[True][1] == pytest.approx(ends[False][1], rel=1e-4)
    assert ends[True][2] == pytest.approx(ends[False][2], rel=1e-5)
    assert ends[True][3] < 0.6 * ends[False][3]
    for name, tensor in ends[True][0].items():
        other = ends[False][0][name]
        if other.shape != tensor.shape:
            height, width = tensor.shape[2:]
            other = other[:, :, 1 : 1 + height, 1 : 1 + width]
        assert torch.allclose(tensor.float(), other.float(), rtol=1e-3, atol=2e-4), name


def test_larger_maps_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, stride=2))
    crop_taps(model, ImageShape(1, 4, 4))
    assert [tuple(module.weight.shape) for module in model] == [(2, 1, 3, 3), (2, 2, 3, 3)]  # type: ignore[arg-type]
