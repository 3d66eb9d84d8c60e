"""A projection before the last layer: what it replaces, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch

from motley.assembly import build_split
from motley.config import ModelSettings, parse_overrides, resolve
from motley.federation import Federation
from motley.models import MODELS, ImageShape
from motley.models.inputs import TableShape, example_inputs
from motley.models.projection import representation_and_answer, with_projection
from motley.models.stages import features
from tests.conftest import refused, tiny_config

IMAGE = ImageShape(3, 32, 32)
SIZES = ["resnet10", "resnet50", "vit1", "mlp2", "cnn"]


def build(size: str) -> torch.nn.Module:
    torch.manual_seed(0)
    architecture = MODELS[size]
    return architecture.make(getattr(ModelSettings(sizes=(size,)), architecture.family), IMAGE, 10)


@pytest.mark.parametrize("size", SIZES)
def test_the_last_layer_reads_the_projection_and_all_before_it_is_as_it_was(size: str) -> None:
    plain = build(size).eval()
    model = with_projection(copy.deepcopy(plain), 7).eval()
    images = torch.randn(2, *IMAGE)
    assert torch.equal(features(model, images), features(plain, images))
    representation, answer = representation_and_answer(model, images)
    assert representation.shape == (2, 7) and answer.shape == (2, 10)
    assert torch.equal(model(images), answer)
    new = model.state_dict().keys() - plain.state_dict().keys()
    assert len(new) == 6 and all(".project." in name or ".classify." in name for name in new)


@pytest.mark.parametrize("size", SIZES)
def test_without_one_the_representation_is_what_enters_the_last_layer(size: str) -> None:
    model = build(size).eval()
    images = torch.randn(2, *IMAGE)
    representation, answer = representation_and_answer(with_projection(model, 0), images)
    assert torch.equal(representation, features(model, images)) and torch.equal(
        answer, model(images)
    )


def test_a_federation_shares_it_and_still_pairs_layers() -> None:
    split = Federation(tiny_config("model.projection=5")).split
    assert "fc.project.2.weight" in split.parameters and "fc.weight" not in split.parameters
    assert split.cross_layers == Federation(tiny_config()).split.cross_layers


def test_a_width_is_not_negative() -> None:
    assert (
        refused("model.projection=-1")
        == "model.projection = -1: should be greater than or equal to 0."
    )


@pytest.mark.parametrize("size", ["logistic", "table2"])
def test_networks_for_tables_may_have_a_projection(size: str) -> None:
    """They ask their head for its type, and a projection is no linear layer."""
    shape = TableShape(3, (2,))
    settings = (f"model.sizes=['{size}']", "model.projection=4")
    split = build_split(resolve("", [parse_overrides(settings)]), shape, 5)
    assert split.build(size)(example_inputs(shape, 2)).shape == (2, 5)
