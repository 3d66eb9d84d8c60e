"""Chains of stages: every family's forward pass is its chain, and every parameter belongs to one link of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motley.config import ModelSettings
from motley.core.errors import MotleyError
from motley.models import MODELS, ImageShape, ModelSpec
from motley.models.facts import classifiers_of
from motley.models.inputs import ArrayShape
from motley.models.projection import with_projection
from motley.models.spec import Stage, spec_of
from motley.models.stages import chain_of, features, owned, run, shape_behind, shape_of

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
    return architecture.make(getattr(SETTINGS, architecture.family), IMAGE, 10).eval()


def test_every_family_has_a_chain() -> None:
    """Families for other inputs than images are in test_sequences.py."""
    others = {"cnn1d", "lstm", "decoder", "encoder", "table"}
    families = {entry.item.family for entry in MODELS}
    assert {MODELS[size].family for size in CHAINS} == families - others


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
    assert (
        torch.equal(features(model, images), run(chain[:-1], images))
        and features(model, images).dim() == 2
    )
    head = model.get_submodule(MODELS[size].head)
    assert torch.equal(head(features(model, images)), model(images))


@pytest.mark.parametrize("size", CHAINS)
def test_shapes_are_known_without_memory(size: str) -> None:
    with torch.device("meta"):
        blueprint = build(size)
    model, images = build(size), torch.randn(2, *IMAGE)
    for at in range(1, len(CHAINS[size])):
        outputs = run(chain_of(model)[:at], images)
        assert shape_behind(blueprint, at, IMAGE) == outputs.shape[1:]


VALUES: dict[str, Callable[[Tensor], object]] = {
    "number": lambda x: x.sum().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
    "text": lambda x: f"{x.sum():.2f}",
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "constant": lambda x: x + torch.ones(1, device="cpu"),
}


@pytest.mark.parametrize("name", VALUES)
def test_shapes_are_known_of_models_that_look_at_values(name: str) -> None:
    with torch.device("meta"):
        blueprint = nn.Linear(4, 3)
    devices = []

    def compute(model: nn.Module, inputs: Tensor) -> Tensor:
        devices.append(inputs.device.type)
        outputs: Tensor = model(inputs)
        VALUES[name](outputs)
        return outputs

    assert shape_of(blueprint, compute, ArrayShape((4,))) == (3,)
    assert devices == ["meta", "cpu"]


@pytest.mark.parametrize("error", [KeyError, AttributeError, IndexError, MotleyError])
def test_an_error_that_is_not_about_values_is_raised_at_once(error: type[Exception]) -> None:
    with torch.device("meta"):
        blueprint = nn.Linear(4, 3)
    devices = []

    def compute(model: nn.Module, inputs: Tensor) -> Tensor:
        devices.append(inputs.device.type)
        raise error("a mistake")

    with pytest.raises(error, match="a mistake"):
        shape_of(blueprint, compute, ArrayShape((4,)))
    assert devices == ["meta"]


def test_a_member_is_not_the_beginning_of_anothers_name() -> None:
    model = MODELS["vit11"].make(SETTINGS.vit, IMAGE, 10)
    names = owned(model, [stage for stage in chain_of(model) if stage.name == "block1"])
    assert names and all(name.startswith("blocks.1.") for name in names)


def test_the_head_of_a_chain_is_the_one_that_the_model_has_now() -> None:
    model = with_projection(build("mlp2"), 5)
    images = torch.randn(2, *IMAGE)
    assert torch.equal(run(chain_of(model), images), model(images))
    assert "head.project.0.weight" in owned(model, chain_of(model)[-1:])


def test_a_model_of_ones_own_without_a_chain_is_refused() -> None:
    with pytest.raises(
        MotleyError, match=r"model\.sizes: Sequential declares no chain of stages .*method\.name"
    ):
        chain_of(torch.nn.Sequential())


def test_any_module_becomes_a_chain_by_declaring_its_stages() -> None:
    """Nothing but `build` is required, and no base class: the declaration stands beside the model."""

    def build() -> torch.nn.Module:
        body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
        return torch.nn.Sequential(body, torch.nn.Linear(5, 2))

    bare = ModelSpec(build).make()
    with pytest.raises(MotleyError, match="declares no chain of stages"):
        chain_of(bare)
    spec = ModelSpec(build, stages=(Stage("body", "0"), Stage("head", "1")), head="1")
    model = copy.deepcopy(spec.make())
    assert spec_of(model) is spec and list(model.state_dict()) == list(bare.state_dict())
    images = torch.randn(3, 3, 2, 2)
    assert torch.equal(run(chain_of(model), images), model(images)) and features(
        model, images
    ).shape == (3, 5)
    assert owned(model, chain_of(model)[:1]) == ["0.1.weight", "0.1.bias"]
    with_projection(model, 4)
    assert features(model, images).shape == (3, 5) and model(images).shape == (3, 2)
    assert classifiers_of(model) == ("1.classify",)


@pytest.mark.parametrize("size", CHAINS)
def test_declared_blocks_are_modules_in_the_models_order(size: str) -> None:
    model, blocks = build(size), MODELS[size].blocks
    paths = [name for name, _ in model.named_modules() if name in blocks]
    assert paths == list(blocks)
    assert blocks or size == "cnn"
