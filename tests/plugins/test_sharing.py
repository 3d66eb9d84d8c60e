"""Which tensors users' models share, and what happens to the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.core.merge import merge
from motley.core.part import take
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.models import MODELS, ModelSpec
from motley.splits import SPLITS, Depth, SplitSettings
from motley.testing import check_method
from tests.conftest import tiny_config


def net(hidden: int, depth: int, classes: int = 3) -> nn.Module:
    layers: dict[str, nn.Module] = {"stem": nn.Linear(4, 5)}
    for number in range(depth):
        layers[f"block{number}"] = nn.Linear(5, 5)
    layers["wide"] = nn.Linear(5, hidden)
    layers["head"] = nn.Linear(hidden, classes)
    return nn.Sequential(nn.ModuleDict(layers))


def split(**models: nn.Module) -> Depth:
    builds = {size: (lambda model=model: model) for size, model in models.items()}
    made = SPLITS["depth"](builds, SplitSettings())
    assert isinstance(made, Depth)
    return made


def test_equal_names_and_shapes_are_shared_and_other_shapes_are_not() -> None:
    with torch.device("meta"):
        three = split(small=net(6, 1), medium=net(6, 2), large=net(8, 2))
    placed = {size: {n: p.name for n, p in three.part(size).items()} for size in three.sizes}
    for size in three.sizes:
        assert placed[size]["0.stem.weight"] == "0.stem.weight"
        assert placed[size]["0.head.bias"] == "0.head.bias"
    assert placed["large"]["0.block1.weight"] == placed["medium"]["0.block1.weight"]
    # Two sizes agree on a shape, and the third has another one.
    for size, owner in (("small", "small"), ("medium", "small"), ("large", "large")):
        assert placed[size]["0.wide.weight"] == f"{owner}/0.wide.weight"
        assert placed[size]["0.wide.bias"] == f"{owner}/0.wide.bias"
        assert placed[size]["0.head.weight"] == f"{owner}/0.head.weight"
    assert tuple(three.meta_state["large/0.wide.weight"].shape) == (8, 5)


def test_merging_averages_every_tensor_over_its_owners() -> None:
    two = split(small=net(6, 1), large=net(8, 2))
    state = two.initial(seed=1)
    assert take(state, two.part("large"))["0.wide.weight"].shape == (8, 5)
    updates = []
    for client, (size, value) in enumerate((("small", 1.0), ("large", 3.0))):
        part = two.part(size)
        delta = {name: torch.full_like(t, value) for name, t in take(state, part).items()}
        updates.append(ClientUpdate(client=client, size=size, part=part, delta=delta))
    merged = merge(state, updates).delta
    expected = {
        "0.stem.weight": 2.0,
        "0.head.bias": 2.0,
        "0.block0.weight": 2.0,
        "0.block1.weight": 3.0,
        "small/0.wide.weight": 1.0,
        "large/0.wide.weight": 3.0,
    }
    for name, value in expected.items():
        assert torch.all(merged[name] == value), name


def test_sizes_that_share_nothing_are_refused() -> None:
    with pytest.raises(MotleyError) as raised:
        split(one=nn.Linear(4, 3), other=nn.Sequential(nn.Linear(4, 3)))
    assert "'one' has no parameter with the same name and shape" in str(raised.value)
    assert "Use split.name = 'grouped' if that is intended." in str(raised.value)


def test_motleys_own_models_that_disagree_are_still_refused() -> None:
    config = tiny_config("model.sizes=['resnet18', 'resnet50']", "split.name=depth")
    with pytest.raises(MotleyError, match="cannot share"):
        Federation(config)


def test_a_registered_family_needs_no_settings_table() -> None:
    """It failed with: 'ModelSettings' object has no attribute 'mynet'."""

    def build(options: dict[str, int], shape: object, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, options.get("hidden", classes)))

    MODELS.register("mynet1", "a toy")(ModelSpec(build, family="mynet"))
    try:
        changes = ("data.transform.resize=0", "model.sizes=mynet1", "model.resnet={}")
        federation = Federation(tiny_config(*changes))
        assert tuple(federation.split.meta_state["1.weight"].shape) == (10, 64)
        config = tiny_config(*changes, "model.options.hidden=11")
        with pytest.raises(MotleyError, match="11"):
            Federation(config)
    finally:
        del MODELS._entries["mynet1"]


def test_the_contract_of_methods_can_be_checked() -> None:
    check_method("scaffold")
    from motley import ClientAlgorithm, Method, Requirements, Step

    class Forgetful(ClientAlgorithm):
        rounds = 0

        def before_training(self, step: Step) -> None:
            self.rounds += 1  # kept in Python: gone after resuming

        def after_backward(self, step: Step) -> None:
            for gradient in step.grads.values():
                gradient.mul_(self.rounds)

    class Wrong(Method):
        Client = Forgetful
        requirements = Requirements(own_training=True)

    with pytest.raises(AssertionError, match="round 1, run twice from the same state"):
        check_method(Wrong, training={"rounds": 3, "optimizer": {"name": "sgd", "lr": 0.1}})
