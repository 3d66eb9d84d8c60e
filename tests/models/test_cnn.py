"""The network of pfl-research's benchmark: size, layers, initial weights, and dropout under every engine."""

from __future__ import annotations

import math

import pytest
import torch

from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.models import MODELS, ImageShape
from motley.models.cnn import CNN, CNNSettings, cross_layers
from motley.models.stages import features
from motley.runs.checkpoint import fingerprint
from motley.runs.run import run_rounds
from motley.settings import validate
from tests.conftest import tiny_config

CIFAR = ImageShape(3, 32, 32)
SMALL = ImageShape(2, 8, 7)


def build(image: ImageShape = SMALL, **settings: float) -> CNN:
    model = MODELS["cnn"].make(CNNSettings(**settings), image, 10)
    assert isinstance(model, CNN)
    return model


def test_parameters_are_those_that_pfl_research_publishes() -> None:
    parameters = sum(parameter.numel() for parameter in build(CIFAR).parameters())
    assert parameters == 1_626_442
    assert f"{parameters:,} parameters" in MODELS.entry("cnn").summary


def test_shapes() -> None:
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in build(CIFAR).state_dict().items()
        if "weight" in name
    }
    assert shapes == {
        "conv1.weight": (32, 3, 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "hidden.weight": (128, 64 * 14 * 14),
        "head.weight": (10, 128),
    }


def test_forward_is_the_published_sequence() -> None:
    """Against torch's modules in a row, with the same weights and the same dropout masks."""
    model, x = build(), torch.randn(4, *SMALL)
    sequence = torch.nn.Sequential(
        model.conv1,
        torch.nn.ReLU(),
        model.conv2,
        torch.nn.ReLU(),
        torch.nn.MaxPool2d((2, 2)),
        torch.nn.Dropout(0.25),
        torch.nn.Flatten(),
        model.hidden,
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        model.head,
    )
    for mode in (True, False):
        answers = []
        for module in (model.train(mode), sequence.train(mode)):
            torch.manual_seed(3)
            answers.append(module(x))
        torch.testing.assert_close(*answers)
    torch.testing.assert_close(model.head(features(model, x)), answers[0])


def test_dropout_acts_in_training_only_and_can_be_turned_off() -> None:
    x = torch.randn(4, *SMALL)
    model = build().train()
    assert not torch.equal(model(x), model(x))
    model = build(map_dropout=0.0, hidden_dropout=0.0).train()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("layer", ["conv1", "conv2", "hidden", "head"])
def test_initial_weights_are_glorots(layer: str) -> None:
    weight = build(CIFAR).get_parameter(f"{layer}.weight").detach()
    taps = weight[0, 0].numel() if weight.dim() == 4 else 1
    bound = math.sqrt(6 / ((weight.shape[0] + weight.shape[1]) * taps))
    assert 0.95 * bound < weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_no_layers_help_each_other() -> None:
    assert cross_layers(build()) == []


def test_an_image_that_is_too_small_is_refused() -> None:
    assert build(ImageShape(1, 6, 6))(torch.zeros(1, 1, 6, 6)).shape == (1, 10)
    with pytest.raises(MotleyError, match="at least 6 pixels high and wide, not 5"):
        build(ImageShape(1, 8, 5))


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(MotleyError, match=r"hidden_dropout"):
        validate(CNNSettings, {"hidden_dropout": 1.0}, where="model.cnn")


def test_dropout_is_the_same_under_every_engine() -> None:
    def final(*overrides: str) -> str:
        settings = (
            "model.sizes=['cnn']",
            "training.steps=2",
            "training.batch_size=8",
            "training.rounds=2",
        )
        federation = Federation(tiny_config(*settings, *overrides))
        return fingerprint(run_rounds(federation, federation.initial_state(), []).state)

    plain = final("engine.name=debug")
    assert final("engine.slots=1") == plain
    assert final("engine.slots=3") == plain
    assert final("model.cnn.map_dropout=0", "model.cnn.hidden_dropout=0") != plain
