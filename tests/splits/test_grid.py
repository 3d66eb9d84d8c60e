"""Exits and levels that end at them, InclusiveFL's parts, and FjORD's nested widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from motley.core.errors import MotleyError
from motley.core.part import State, take
from motley.federation import Federation
from motley.methods.inclusivefl import teachers_of
from motley.splits import Grid, Inclusive, Ordered
from motley.splits.exits import WithExits, exit_logits_of
from motley.splits.ordered_dropout import at_width, widths_of
from tests.conftest import refused, tiny_config
from tests.splits.test_width import images, lively

RESNET = (
    "model.sizes=['resnet14']",
    "split.cuts=[2,3,6]",
    "split.rates=[0.5,0.75,1]",
    "model.resnet.width=0.125",
)
VIT = (
    "model.sizes=['vit3']",
    "model.vit.dim=32",
    "model.vit.heads=4",
    "model.vit.patch=4",
    "split.cuts=[1,2,3]",
)
SHARED = "split.normalization_statistics=shared"


def split_of(*overrides: str) -> Any:
    return Federation(tiny_config(SHARED, *overrides)).split


def grid(*overrides: str) -> Grid:
    split = split_of("split.name=grid", *overrides)
    assert isinstance(split, Grid)
    return split


def only(state: State, part: Any) -> State:
    """Return the state with all coordinates outside a part set to zero."""
    kept = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for name, piece in part.items():
        index = piece.index or (slice(None),) * state[name].dim()
        kept[name][index] = state[name][index]
    return kept


@pytest.mark.parametrize("head", ["convolution", "linear"])
def test_a_levels_answers_are_those_of_the_whole_network_with_all_else_at_zero(head: str) -> None:
    split = grid(*RESNET, f"split.head={head}")
    state = lively(split)
    whole = split.whole.build().eval()
    for level, size in enumerate(split.sizes):
        model = split.build(size).eval()
        part = split.part(size)
        model.load_state_dict(take(state, part))
        whole.load_state_dict(only(state, part))
        with torch.no_grad():
            own, all_answers = exit_logits_of(model, images(8)), exit_logits_of(whole, images(8))
            assert len(own) == level + 1 and len(all_answers) == 3
            for mine, theirs in zip(own, all_answers, strict=False):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(model(images(8)), own[-1])
        assert own[-1].abs().max() > 0


def test_exits_of_a_transformer_at_full_width_are_prefixes_of_each_other() -> None:
    split = grid(*VIT, "split.rates=[1,1,1]")
    state = split.initial(1)
    answers = []
    for size in split.sizes:
        model = split.build(size).eval()
        model.load_state_dict(take(state, split.part(size)))
        with torch.no_grad():
            answers.append(exit_logits_of(model, images(8)))
    assert [len(own) for own in answers] == [1, 2, 3]
    assert all(torch.equal(a, b) for own in answers for a, b in zip(own, answers[-1], strict=False))
    narrow = grid(*VIT, "split.rates=[0.5,0.5,1]")
    for size in narrow.sizes:
        narrow.build(size).load_state_dict(take(narrow.initial(1), narrow.part(size)))


def test_a_level_has_the_blocks_and_exits_up_to_its_cut() -> None:
    split = grid(*RESNET)
    names = [set(split.part(size)) for size in split.sizes]
    assert "layer2.0.conv1.weight" in names[0] and not any(
        name.startswith(("layer3", "fc")) for name in names[0]
    )
    assert {name.split(".")[1] for name in names[1] if name.startswith("exits")} == {"0", "1"}
    assert (
        "fc.weight" in names[2] and "fc.weight" not in names[1] and names[0] < names[1] < names[2]
    )
    assert names[2] == split.initial(1).keys()
    assert split.sizes == ("resnet14-e1", "resnet14-e2", "resnet14-e3")
    assert not any(pair.target.startswith("exits") for pair in split.cross_layers)


def test_the_mean_of_all_exits_can_be_the_answer() -> None:
    model = grid(*RESNET, "split.output=mean").build("resnet14-e3").eval()
    assert isinstance(model, WithExits)
    with torch.no_grad():
        torch.testing.assert_close(
            model(images(8)), torch.stack(model.exit_logits(images(8))).mean(0)
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.sizes=['resnet14']", "split.cuts=[2,5]", "split.rates=[1,1]"), "has 6 blocks"),
        (
            ("model.sizes=['mlp2']", "split.cuts=[1]", "split.rates=[1]"),
            "MLP has no exits. Allowed are ResNets",
        ),
        ((*RESNET, "model.projection=8"), r"model\.projection: needs a network with one head"),
        *(
            ((*RESNET, f"method.name={name}"), "declares no chain of stages")
            for name in ("fedin", "fedimpro", "moon")
        ),
    ],
)
def test_what_has_no_exits_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(MotleyError, match=words):
        Federation(tiny_config("split.name=grid", *overrides))


def test_wrong_levels_are_refused_by_name() -> None:
    assert "split.cuts = [3, 2]: numbers of blocks must increase" in refused(
        "split.name=grid", "split.cuts=[3,2]"
    )
    assert "rates = [1.0]: 4 are needed" in refused("split.name=grid", "split.rates=[1]")


# ---- InclusiveFL's parts


def test_last_blocks_and_heads_are_a_sizes_own() -> None:
    split = split_of("split.name=inclusive")
    assert isinstance(split, Inclusive)
    small, middle = split.part("resnet10"), split.part("resnet14")
    assert small["layer4.0.conv1.weight"].name == "resnet10/layer4.0.conv1.weight"
    assert middle["layer4.0.conv1.weight"].name == "layer4.0.conv1.weight"
    assert middle["layer4.1.bn1.weight"].name == "resnet14/layer4.1.bn1.weight"
    assert small["fc.bias"].name == "resnet10/fc.bias"
    assert (
        small["layer3.0.conv2.weight"].name
        == middle["layer3.0.conv2.weight"].name
        == "layer3.0.conv2.weight"
    )
    assert teachers_of(split, "resnet10", "resnet14")["layer4.0.conv2.weight"] == [
        "layer4.0.conv2.weight",
        "layer4.1.conv2.weight",
    ]
    assert teachers_of(split, "resnet10", "resnet14")["layer4.0.conv1.weight"] == [
        "layer4.0.conv1.weight"
    ], "block 1 has another shape"
    assert teachers_of(split, "resnet14", "resnet18")["layer4.1.conv1.weight"] == [
        "layer4.1.conv1.weight"
    ]


# ---- FjORD's networks


@pytest.mark.parametrize(
    ("model", "small"),
    [
        ("resnet14", ()),
        ("resnet50", ()),
        ("heterofl-resnet18", ("model.preact.width=0.0625",)),
        ("mlp3", ("model.mlp.hidden=12",)),
        ("cnn", ("model.cnn={map_dropout=0, hidden_dropout=0}",)),
    ],
)
def test_a_masked_answer_is_the_narrower_networks_in_training_and_in_evaluation(
    model: str, small: tuple[str, ...]
) -> None:
    sizes = f"model.sizes=['{model}']"
    split = split_of("split.name=ordered", "split.rates=[1,0.5,0.25]", sizes, *small)
    assert isinstance(split, Ordered)
    state = lively(split)
    widest = split.build(f"{model}-w1")
    widest.load_state_dict(take(state, split.part(f"{model}-w1")))
    assert widths_of(widest) == 3
    for row, rate in enumerate((0.25, 0.5, 1)):
        size = f"{model}-w{rate:g}"
        narrow = split.build(size)
        assert widths_of(narrow) == row + 1
        narrow.load_state_dict(take(state, split.part(size)))
        for training in (True, False):
            with torch.no_grad(), at_width(widest.train(training), torch.tensor([row])):
                masked = widest(images(8))
            with torch.no_grad():
                torch.testing.assert_close(
                    masked, narrow.train(training)(images(8)), rtol=1e-2, atol=2e-3
                )


def test_a_pass_of_a_width_moves_that_widths_statistics_only() -> None:
    split = split_of("split.name=ordered", "split.rates=[1,0.5,0.25]", "model.sizes=['resnet10']")
    model = split.build("resnet10-w1")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with at_width(model.train(), torch.tensor([1])):
        model(images(8))
    moved = model.state_dict()["bn1.running_mean"] != before["bn1.running_mean"]
    assert moved.shape[0] == 3 and moved.any(1).tolist() == [False, True, False]
    model(images(8))
    assert (model.state_dict()["bn1.running_mean"] != before["bn1.running_mean"]).any(
        1
    ).tolist() == [False, True, True]


def test_a_size_holds_the_rows_of_its_own_width_and_below() -> None:
    split = split_of("split.name=ordered", "split.rates=[1,0.5,0.25]", "model.sizes=['resnet10']")
    assert split.part("resnet10-w0.5")["bn1.running_var"].index == (slice(0, 2), slice(0, 2))
    assert split.part("resnet10-w1")["bn1.running_var"].index is None
    assert split.initial(1)["bn1.running_var"].shape == (3, 4)


def test_norms_that_see_all_channels_cannot_be_ordered() -> None:
    with pytest.raises(MotleyError, match="LayerNorm sees all channels at once"):
        split_of("split.name=ordered", *VIT[:-1])
