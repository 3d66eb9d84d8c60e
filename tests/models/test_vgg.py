"""VGG networks: sizes, layers, dropout, and what is too small for them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models import MODELS, ImageShape
from motley.models.channels import Axis
from motley.models.vgg import PARAMETERS, VGG, VGGSettings, channels, cross_layers

CIFAR = ImageShape(3, 32, 32)


def build(depth: int, image: ImageShape = CIFAR, **settings: float) -> VGG:
    model = MODELS[f"vgg{depth}"].make(VGGSettings(**settings), image, 10)
    assert isinstance(model, VGG)
    return model


@pytest.mark.parametrize("depth", PARAMETERS)
def test_the_summary_states_the_true_number_of_parameters(depth: int) -> None:
    parameters = sum(parameter.numel() for parameter in build(depth).parameters())
    assert parameters == PARAMETERS[depth]
    assert f"{parameters:,} parameters" in MODELS.entry(f"vgg{depth}").summary


@pytest.mark.parametrize(
    ("depth", "channels"),
    [
        (9, [(3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256)]),
        (
            11,
            [
                (3, 64),
                (64, 128),
                (128, 256),
                (256, 256),
                (256, 512),
                (512, 512),
                (512, 512),
                (512, 512),
            ],
        ),
    ],
)
def test_layers_with_weights(depth: int, channels: list[tuple[int, int]]) -> None:
    modules = list(build(depth).modules())
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d)]
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    assert [(conv.in_channels, conv.out_channels) for conv in convolutions] == channels
    assert len(convolutions) + len(linear) == depth
    assert [layer.out_features for layer in linear] == [512, 512, 10]
    assert linear[0].in_features == {9: 4096, 11: 512}[depth]


def test_dropout_acts_in_training_only_and_can_be_turned_off() -> None:
    x = torch.randn(4, *CIFAR)
    model = build(9, dropout=0.5).train()
    assert not torch.equal(model(x), model(x))
    assert not any(isinstance(module, nn.Dropout2d) for module in build(11).modules())
    still = build(9, dropout=0.0, map_dropout=0.0).train()
    assert torch.equal(still(x), still(x)) and torch.equal(still(x), still.eval()(x))


@pytest.mark.parametrize(("depth", "places", "probability"), [(9, [1, 7], 0.1), (11, [1, 4], 0.5)])
def test_dropout_is_where_and_as_strong_as_in_fedimpros_networks(
    depth: int, places: list[int], probability: float
) -> None:
    """VGG9 drops before its first hidden layer and before the head, VGG11 before both hidden layers."""
    hidden = build(depth).hidden
    dropouts = {at: layer.p for at, layer in enumerate(hidden) if isinstance(layer, nn.Dropout)}
    assert dropouts == dict.fromkeys(places, probability)
    assert isinstance(hidden[2], nn.Linear) and isinstance(hidden[5], nn.Linear)
    stronger = build(depth, dropout=0.25).hidden
    assert [layer.p for layer in stronger if isinstance(layer, nn.Dropout)] == [0.25, 0.25]


def test_dropout_is_a_probability_or_auto() -> None:
    with pytest.raises(MotleyError, match='should be a number from 0 to below 1, or "auto"'):
        VGGSettings(dropout=1.0)


def test_an_image_that_is_too_small_is_refused() -> None:
    assert build(9, ImageShape(1, 8, 9))(torch.zeros(1, 1, 8, 9)).shape == (1, 10)
    with pytest.raises(
        MotleyError, match="model 'vgg11': images must be at least 32 pixels high and wide, not 16"
    ):
        build(11, ImageShape(3, 32, 16))


def test_no_layers_help_each_other() -> None:
    assert cross_layers(build(9)) == []


@pytest.mark.parametrize(("depth", "pixels"), [(9, 16), (11, 1)])
def test_a_layer_reads_what_the_one_before_writes_and_the_first_hidden_one_every_pixel(
    depth: int, pixels: int
) -> None:
    declared = list(channels(build(depth)).items())
    assert declared[0][1][1] is None
    for (before, (written, _)), (name, (_, read)) in pairwise(declared):
        assert isinstance(written, Axis)
        assert read == written._replace(inner=pixels if name == "hidden.2" else 1), (before, name)
    assert [name for name, _ in declared[-3:]] == ["hidden.2", "hidden.5", "head"]
