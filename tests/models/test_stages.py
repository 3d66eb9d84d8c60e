"""Chains of stages: every family's forward pass is its chain, and every parameter belongs to one link of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from motley.config import ModelSettings
from motley.core.errors import MotleyError
from motley.models import MODELS, ImageShape
from motley.models.projection import with_projection
from motley.models.stages import chain_of, owned, run, shape_behind

IMAGE = ImageShape(3, 32, 32)
CHAINS = {
    "resnet10": ["stem", "layer1", "layer2", "layer3", "layer4", "pool", "head"],
    "resnet50": ["stem", "layer1", "layer2", "layer3", "layer4", "pool", "head"],
    "heterofl-resnet18": ["stem", "block1", "block2", "block3", "block4", "block5", "pool", "head"],
    "vit2": ["embed", "block0", "block1", "token", "head"],
    "mlp3": ["layer0", "layer1", "layer2", "head"],
    "cnn": ["conv1", "conv2", "hidden", "head"],
    "vgg9": ["block1", "block2", "block3", "hidden", "head"],
    "vgg11": ["block1", "block2", "block3", "block4", "block5", "hidden", "head"],
}
SETTINGS = ModelSettings.model_validate(
    {
        "sizes": list(CHAINS),
        "resnet": {"width": 1 / 16},
        "vit": {"patch": 8, "dim": 12, "heads": 2},
    }
)


def build(size: str) -> Any:
    torch.manual_seed(0)
    architecture = MODELS[size]
    return architecture.build(getattr(SETTINGS, architecture.family), IMAGE, 10).eval()


def test_every_family_has_a_chain() -> None:
    assert {MODELS[size].family for size in CHAINS} == {entry.item.family for entry in MODELS}


@pytest.mark.parametrize(("size", "names"), CHAINS.items())
def test_a_chain_is_the_whole_model(size: str, names: list[str]) -> None:
    model, images = build(size), torch.randn(2, *IMAGE)
    chain = chain_of(model)
    assert [stage.name for stage in chain] == names
    owners = Counter(name for stage in chain for name in owned(model, [stage]))
    assert owners == Counter(name for name, _ in model.named_parameters())
    assert torch.equal(run(chain, images), model(images))
    for at in range(1, len(chain)):
        assert torch.equal(run(chain[at:], run(chain[:at], images)), model(images))
    assert torch.equal(model.features(images), run(chain[:-1], images)) and model.features(images).dim() == 2


@pytest.mark.parametrize("size", CHAINS)
def test_shapes_are_known_without_memory(size: str) -> None:
    with torch.device("meta"):
        blueprint = build(size)
    model, images = build(size), torch.randn(2, *IMAGE)
    for at in range(1, len(CHAINS[size])):
        assert shape_behind(chain_of(blueprint)[:at], IMAGE) == run(chain_of(model)[:at], images).shape[1:]


def test_a_member_is_not_the_beginning_of_anothers_name() -> None:
    model = MODELS["vit11"].build(SETTINGS.vit, IMAGE, 10)
    names = owned(model, [stage for stage in chain_of(model) if stage.name == "block1"])
    assert names and all(name.startswith("blocks.1.") for name in names)


def test_the_head_of_a_chain_is_the_one_that_the_model_has_now() -> None:
    model = with_projection(build("mlp2"), 5)
    images = torch.randn(2, *IMAGE)
    assert torch.equal(run(chain_of(model), images), model(images))
    assert "head.project.0.weight" in owned(model, chain_of(model)[-1:])


def test_a_model_of_ones_own_without_a_chain_is_refused() -> None:
    with pytest.raises(MotleyError, match=r"model\.sizes: Sequential declares no chain of stages .*method\.name"):
        chain_of(torch.nn.Sequential())
