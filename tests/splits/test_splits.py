"""The part of the global state that each split gives to each size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from motley.assembly import build_split
from motley.config import parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.core.part import take
from motley.federation import Federation
from motley.models import CrossLayer
from motley.models.inference.facts import random_inputs
from motley.models.inputs import SignalShape
from motley.splits import Split, SplitSettings
from motley.splits.depth import Depth
from motley.splits.trained import trained_model
from tests.conftest import tiny_config

VIT = (
    "model.sizes=['vit1','vit2','vit3']",
    "model.vit.dim=32",
    "model.vit.heads=4",
    "model.vit.patch=4",
)


def split_of(*overrides: str) -> Split:
    return Federation(tiny_config(*overrides)).split


@pytest.mark.parametrize("model", [(), VIT], ids=["stage", "layer"])
def test_depth_gives_a_size_the_layers_it_has(model: tuple[str, ...]) -> None:
    split = split_of("split.normalization_statistics=shared", *model)
    state = split.initial(1)
    largest = split.build(split.sizes[-1]).state_dict()
    assert state.keys() == largest.keys()
    for size in split.sizes:
        module = split.build(size)
        module.load_state_dict(take(state, split.part(size)))  # strict: names and shapes
        assert all(
            piece.name == local and piece.index is None for local, piece in split.part(size).items()
        )


def test_small_sizes_start_as_slices_of_the_largest() -> None:
    split = split_of("split.normalization_statistics=shared")
    state = split.initial(3)
    assert torch.equal(
        take(state, split.part("resnet10"))["layer1.0.conv1.weight"], state["layer1.0.conv1.weight"]
    )
    assert not torch.equal(
        state["layer1.0.conv1.weight"], split.initial(4)["layer1.0.conv1.weight"]
    )


def test_per_size_statistics_share_weights_and_nothing_else() -> None:
    split = split_of("split.normalization_statistics=per-size")
    small, large = split.part("resnet10"), split.part("resnet18")
    for local in small:
        shared = small[local].name == large[local].name
        assert shared == (
            not local.endswith(("running_mean", "running_var", "num_batches_tracked"))
        )
    assert small["bn1.running_var"].name == "resnet10/bn1.running_var"
    assert not any(name.endswith(("running_mean", "running_var")) for name in split.parameters)
    assert "layer1.0.conv1.weight" in split.parameters


def test_grouped_shares_nothing() -> None:
    split = split_of("split.name=grouped")
    names = [{piece.name for piece in split.part(size).values()} for size in split.sizes]
    assert not names[0] & names[1] and not names[1] & names[2] and not names[0] & names[2]
    assert split.initial(1).keys() == set().union(*names)


def test_grouped_takes_unrelated_architectures() -> None:
    federation = Federation(
        tiny_config(
            "split.name=grouped",
            "model.sizes=['resnet10','vit2']",
            *VIT[1:],
            "federation.clients_per_round=6",
        )
    )
    server, record = federation.run_round(federation.initial_state())
    assert record.scores.keys() == {"resnet10", "vit2"}
    assert server.round_number == 1


def test_cross_layers_follow_the_global_names() -> None:
    depth = split_of()
    assert set(depth.cross_layers) >= {CrossLayer("layer1.0.conv2.weight", "layer1.1.conv1.weight")}
    grouped = split_of("split.name=grouped")
    assert (
        CrossLayer("resnet18/layer1.0.conv2.weight", "resnet18/layer1.1.conv1.weight")
        in grouped.cross_layers
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("split.name=homogeneous",), "takes exactly one size"),
        (("model.sizes=['resnet18','resnet50']",), "cannot share .*grouped"),
        (("model.sizes=['resnet10','vit2']", *VIT[1:]), "share no layers"),
        (("model.sizes=['resnet10']", "server.inco.variant=official"), "nothing to mix"),
    ],
)
def test_what_cannot_be_one_state_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(MotleyError, match=words):
        split_of(*overrides)


def test_one_size_is_the_same_under_every_split() -> None:
    """With a single size, depth, grouped and homogeneous are all plain FedAvg."""
    ends = []
    for name in ("depth", "homogeneous", "grouped"):
        federation = Federation(tiny_config(f"split.name={name}", "model.sizes=['resnet10']"))
        server = federation.initial_state()
        for _ in range(2):
            server, _ = federation.run_round(server)
        ends.append(take(server.state, federation.split.part("resnet10")))
    assert all(torch.equal(ends[0][name], other[name]) for other in ends[1:] for name in ends[0])


def small_network(input_shape: tuple[int, int, int], num_classes: int, **norm: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, padding=1),
        nn.BatchNorm2d(4, **norm),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


def test_a_trained_network_for_signals_of_several_widths_runs() -> None:
    """It has one-dimensional batch norms."""
    settings = ("model.sizes=['cnn1d-2']", "model.cnn1d.width=8", "split.name=ordered")
    shape = SignalShape(3, 16)
    split = build_split(resolve("", [parse_overrides(settings)]), shape, 4)
    model = trained_model(split, split.initial(1), split.sizes[-1])
    assert model(random_inputs(shape, 2)).shape == (2, 4)


def test_statistics_without_a_momentum_are_refused_for_several_widths() -> None:
    """They would never change, because each width has seen other batches."""
    with pytest.raises(MotleyError, match=r"split\.name = 'ordered'.*momentum = None"):
        Federation(
            models={"small": partial(small_network, momentum=None)},
            data="digits",
            split={"name": "ordered", "rates": [1.0, 0.5]},
        )


def test_no_batch_norm_keeps_statistics_if_test_batches_are_normalized_by_themselves() -> None:
    """Those of three dimensions did."""
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 3))
    settings = SplitSettings(normalization_statistics="batch")
    split = Depth({"one": lambda: model}, settings)
    assert not [name for name in split.meta_state if "running" in name]
