"""Perceptrons: sizes, nesting, and which layers help which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.federation import Federation
from motley.models import MODELS, CrossLayer, ImageShape
from motley.models.mlp import MLP, SIZES, MLPSettings, cross_layers
from motley.models.stages import features
from motley.runs.checkpoint import fingerprint
from motley.runs.run import run_rounds
from tests.conftest import tiny_config

LARGE = ImageShape(3, 32, 32)
SMALL = ImageShape(1, 4, 4)


def build(depth: int, hidden: int = 5, image: ImageShape = SMALL) -> MLP:
    model = MODELS[f"mlp{depth}"].make(MLPSettings(hidden=hidden), image, 10)
    assert isinstance(model, MLP)
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("depth", SIZES)
def test_parameters_follow_the_formula_and_the_summary_states_them(depth: int) -> None:
    parameters = count(build(depth, 64, LARGE))
    assert parameters == (3 * 32 * 32 + 1) * 64 + (depth - 1) * (64 + 1) * 64 + (64 + 1) * 10
    entry = MODELS.entry(f"mlp{depth}")
    assert f"{parameters:,} parameters" in entry.summary
    assert entry.item.family == "mlp"


def test_names_say_which_layer_and_shapes_follow_the_width() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build(3).state_dict().items()}
    assert shapes == {
        "layers.0.weight": (5, 16),
        "layers.0.bias": (5,),
        "layers.1.weight": (5, 5),
        "layers.1.bias": (5,),
        "layers.2.weight": (5, 5),
        "layers.2.bias": (5,),
        "head.weight": (10, 5),
        "head.bias": (10,),
    }


@pytest.mark.parametrize(("shallow", "deep"), [(1, 2), (2, 3), (1, 3)])
def test_a_shallow_size_lies_inside_a_deeper_one(shallow: int, deep: int) -> None:
    inner, outer = (
        {(name, tensor.shape) for name, tensor in build(depth).state_dict().items()}
        for depth in (shallow, deep)
    )
    assert inner < outer


def test_forward_is_relu_of_every_layer_and_the_head() -> None:
    model, x = build(2), torch.randn(3, *SMALL)
    first, second = model.layers
    hidden = second(first(x.reshape(3, 16)).clamp(min=0)).clamp(min=0)
    torch.testing.assert_close(features(model, x), hidden)
    torch.testing.assert_close(model(x), model.head(hidden))


def test_the_second_layer_helps_those_behind_it() -> None:
    assert cross_layers(build(1)) == cross_layers(build(2)) == []
    assert cross_layers(build(3)) == [CrossLayer("layers.1.weight", "layers.2.weight")]


def test_a_federation_of_three_depths_learns_the_digits_with_inco() -> None:
    config = tiny_config(
        "model.sizes=['mlp1','mlp2','mlp3']",
        "training.rounds=5",
        "training.epochs=3",
        "training.optimizer.lr=0.01",
        "server.inco.variant=paper",
    )
    federation = Federation(config)
    assert set(federation.initial_state().state) == set(federation.split.build("mlp3").state_dict())
    server = run_rounds(federation, federation.initial_state(), [])
    assert min(score.accuracy for score in federation.evaluate(server.model).values()) > 0.6


def test_one_slot_several_slots_and_debug_agree() -> None:
    def final(*overrides: str) -> str:
        federation = Federation(
            tiny_config("model.sizes=['mlp1','mlp2','mlp3']", "training.rounds=2", *overrides)
        )
        return fingerprint(run_rounds(federation, federation.initial_state(), []).state)

    plain = final("engine.name=debug")
    assert final("engine.slots=1") == plain
    assert final("engine.slots=3") == plain
