"""Splits by width: channel streams, the three rules that select channels, and narrow models."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from motley.analysis.replay import global_model
from motley.assembly import assign_sizes
from motley.config import load_config
from motley.core.errors import MotleyError
from motley.core.part import State, select, take
from motley.data.device import device_data
from motley.federation import Federation
from motley.models.channels import CLASSES, Axis, axes, positions
from motley.splits import Width
from motley.splits.width import Scaler
from tests.conftest import refused, tiny_config

MODELS = {
    "basic": ("model.sizes=['resnet18']",),
    "cifar-stem": ("model.sizes=['resnet14']", "model.resnet.stem=cifar"),
    "bottleneck": ("model.sizes=['resnet50']",),
    "preact": ("model.sizes=['heterofl-resnet18']", "model.preact.width=0.0625"),
    "vit": ("model.sizes=['vit2']", "model.vit.dim=32", "model.vit.heads=4", "model.vit.patch=4"),
    "mlp": ("model.sizes=['mlp3']", "model.mlp.hidden=12"),
    "cnn": ("model.sizes=['cnn']",),
    "vgg": ("model.sizes=['vgg9']",),
    "projection": ("model.sizes=['resnet10']", "model.projection=8"),
}
#: Size of the images: large enough for VGG's last feature map to have several pixels per channel.
SIDE = 16
RULES = ("leading", "rolling", "random")
RATES = (1.0, 0.5, 0.3, 0.125)


@cache
def federation_of(*overrides: str) -> Federation:
    rates = ("split.name=width", f"split.rates={list(RATES)}")
    shared = (f"data.transform.resize={SIDE}", "split.normalization_statistics=shared")
    return Federation(tiny_config(*rates, *shared, *overrides))


def split_of(*overrides: str) -> Width:
    split = federation_of(*overrides).split
    assert isinstance(split, Width)
    return split


def images(side: int = SIDE) -> torch.Tensor:
    return torch.randn(3, 1, side, side, generator=torch.Generator().manual_seed(0))


def answer(model: nn.Module, state: State) -> torch.Tensor:
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(images())


def lively(split: Width) -> State:
    """Return a state in which no norm is the identity."""
    numbers = torch.Generator().manual_seed(1)
    state = split.initial(1)
    for name, tensor in state.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            state[name] = 0.5 + torch.rand(tensor.shape, generator=numbers)
    return state


@pytest.mark.parametrize("family", MODELS)
def test_a_permutation_of_every_stream_leaves_the_function_as_it_is(family: str) -> None:
    """Layers read and add channels in the order they were written: the streams are right."""
    split = split_of(*MODELS[family])
    state, numbers = lively(split), torch.Generator().manual_seed(2)
    streams = {
        axis.stream: axis.width
        for found in split.axes.values()
        for axis in found
        if axis is not None
    }
    order = {stream: torch.randperm(width, generator=numbers) for stream, width in streams.items()}
    order[CLASSES] = torch.arange(10)
    permuted = {
        name: select(
            tensor,
            tuple(
                slice(None) if a is None else positions(a, order[a.stream])
                for a in split.axes[name]
            ),
        )
        for name, tensor in state.items()
    }
    assert any(not torch.equal(permuted[name], state[name]) for name in state)
    model = split.whole.build()
    torch.testing.assert_close(answer(model, permuted), answer(model, state), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_every_dimension_that_a_layer_shares_is_declared(family: str) -> None:
    """Only image channels, kernels, tokens and counters have no stream; each has one width."""
    split = split_of(*MODELS[family])
    for name, tensor in split.whole.module.state_dict().items():
        for axis, length in zip(split.axes[name][:2], tensor.shape, strict=False):
            if axis is not None:
                assert axis.width * axis.repeats * axis.inner == length, name
            else:
                assert "embed" in name or name == "cls_token" or length in (1, SIDE * SIDE), name
    found = {
        (axis.stream, axis.width)
        for declared in split.axes.values()
        for axis in declared
        if axis is not None
    }
    assert len(found) == len({stream for stream, _ in found})


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(sorted(MODELS)),
    rule=st.sampled_from(RULES),
    rate=st.sampled_from(RATES),
    round_number=st.integers(0, 700),
    client=st.integers(0, 5),
)
def test_a_stream_has_one_index_set_and_the_part_is_a_model(
    family: str, rule: str, rate: float, round_number: int, client: int
) -> None:
    split = split_of(*MODELS[family], f"split.channels={rule}")
    size = next(size for size, own in split.rates.items() if own == rate)
    part = split.part(size, round_number, client)
    chosen: dict[str, list[int]] = {}
    for name, piece in part.items():
        tensor = split.meta_state[piece.name]
        for dim, axis in enumerate(split.axes[name]):
            if axis is None:
                continue
            index = slice(None) if piece.index is None else piece.index[dim]
            every = torch.arange(axis.width).repeat_interleave(axis.inner).repeat(axis.repeats)
            assert len(every) == tensor.shape[dim]
            channels = sorted(set(every[index].tolist()))
            assert chosen.setdefault(axis.stream, channels) == channels, (name, axis)
            assert len(every[index]) == len(channels) * axis.inner * axis.repeats
    split.build(size).load_state_dict(take(lively(split), part))  # strict: names and shapes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", [family for family in MODELS if family != "vit"])
def test_a_narrow_model_is_the_whole_one_with_its_other_channels_at_zero(
    family: str, rule: str
) -> None:
    """It does not hold for layer norm and attention, which see all channels at once."""
    split = split_of(*MODELS[family], f"split.channels={rule}")
    state = lively(split)
    for size in split.sizes:
        part = split.part(size, 7, 3)
        silent = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for name, piece in part.items():
            if piece.index is None:
                silent[name] = state[name]
            else:
                dims = [
                    torch.arange(n)[i] for n, i in zip(state[name].shape, piece.index, strict=True)
                ]
                grid = torch.meshgrid(*dims, indexing="ij")
                silent[name][grid] = state[name][grid]
        narrow = answer(split.build(size), take(state, part))
        torch.testing.assert_close(
            narrow, answer(split.whole.build(), silent), rtol=1e-3, atol=1e-4
        )
        assert narrow.abs().max() > 0


def test_heterofls_resnet18_has_the_papers_number_of_parameters_at_every_rate() -> None:
    split = split_of("model.sizes=['heterofl-resnet18']", "split.rates=[1,0.5,0.25,0.125,0.0625]")
    colours = {1: 3}  # digits have one colour channel, the paper's images three
    for (size, rate), thousands in zip(
        split.rates.items(), (9622, 2409, 604, 152, 38), strict=True
    ):
        module = split.blueprints[size].module
        count = sum(parameter.numel() for parameter in module.parameters())
        count += (colours[1] - 1) * 9 * int(64 * rate)
        assert count // 1000 == thousands or round(count / 1000) == thousands, (size, count)


@pytest.mark.parametrize(("width", "rate"), [(16, 0.5), (12, 0.3), (10, 0.125)])
def test_a_rolling_window_covers_every_channel_equally_often_over_a_cycle(
    width: int, rate: float
) -> None:
    split = split_of("model.sizes=['mlp2']", f"model.mlp.hidden={width}", "split.channels=rolling")
    size = next(size for size, own in split.rates.items() if own == rate)
    counts = torch.zeros(width)
    for round_number in range(1, width + 1):
        piece = split.part(size, round_number)["layers.0.bias"]
        assert piece.index is not None
        counts[piece.index[0]] += 1
    assert torch.equal(counts, torch.full((width,), float(-(-width * rate // 1))))


def test_the_first_rolling_window_has_the_leading_channels_and_the_next_begins_one_further() -> (
    None
):
    rolling, leading = (
        split_of(*MODELS["basic"], f"split.channels={rule}") for rule in ("rolling", "leading")
    )
    for size in rolling.sizes:
        assert rolling.part(size, 1) == leading.part(size, 1) == rolling.part(size)
    second = rolling.part("resnet18-w0.5", 2, 4)["layer1.0.conv1.weight"].index
    assert second is not None and second[:2] == (slice(1, 3), slice(1, 3))


@pytest.mark.parametrize(("rule", "window"), [("rolling", 3), ("leading", 0), ("random", 0)])
def test_a_narrow_size_is_evaluated_as_the_rounds_clients_held_it(rule: str, window: int) -> None:
    """The channels of a rolling window were trained together; the leading ones were not."""
    federation = federation_of(
        *MODELS["basic"], f"split.channels={rule}", "training.steps=1", "evaluation.every=3"
    )
    server = federation.initial_state()
    for _ in range(3):
        server, record = federation.run_round(server)
    scores = {number: federation.evaluate(server.model, number) for number in (0, 3)}
    assert record.scores == scores[3]
    size = "resnet18-w0.5"
    model = federation.split.build(size)
    model.load_state_dict(take(server.model, federation.split.part(size, window)))
    test = device_data(
        federation.dataset.test, federation.config.data.transform, federation.device, augment=False
    )
    seen, labels = test.batch(torch.arange(len(test)))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval()(seen), labels)
    assert scores[3][size].loss == pytest.approx(float(loss), rel=1e-5)
    assert (scores[3] == scores[0]) == (rule != "rolling")
    assert scores[3]["resnet18-w1"] == scores[0]["resnet18-w1"]
    handed_out = global_model(federation, server, size).state_dict()
    assert all(torch.equal(tensor, handed_out[name]) for name, tensor in model.state_dict().items())


def test_random_channels_are_drawn_for_each_client_and_round_and_again_the_same() -> None:
    split = split_of("model.sizes=['mlp2']", "model.mlp.hidden=64", "split.channels=random")

    def drawn(round_number: int, client: int, name: str = "layers.0.bias") -> list[int]:
        index = split.part("mlp2-w0.5", round_number, client)[name].index
        assert index is not None and isinstance(index[0], torch.Tensor)
        return index[0].tolist()

    assert drawn(1, 0) == drawn(1, 0) == sorted(set(drawn(1, 0))) and len(drawn(1, 0)) == 32
    assert drawn(1, 0) != drawn(1, 1) != drawn(2, 1) != drawn(2, 1, "layers.1.bias")


def test_the_scaler_divides_by_the_rate_where_a_layer_was_cut() -> None:
    split = split_of("model.sizes=['mlp2']", "model.mlp.hidden=12", "split.scaler=true")
    model = split.build("mlp2-w0.5")
    scaled = [name for name, module in model.named_modules() if module._forward_hooks]
    assert scaled == ["layers.0", "layers.1"]
    assert not any(module._forward_hooks for module in split.build("mlp2-w1").modules())
    assert Scaler(0.25)(model, (), torch.tensor(3.0)) == 12


def test_positions_of_heads_and_of_flattened_maps() -> None:
    heads = Axis("a", 3, repeats=2)
    assert positions(heads, torch.tensor([0, 2])).tolist() == [0, 2, 3, 5]  # type: ignore[union-attr]
    assert positions(heads, slice(1, 3)).tolist() == [1, 2, 4, 5]  # type: ignore[union-attr]
    maps = Axis("m", 4, inner=2)
    assert positions(maps, slice(1, 3)) == slice(2, 6)
    assert positions(maps, torch.tensor([3, 0])).tolist() == [6, 7, 0, 1]  # type: ignore[union-attr]
    assert axes(
        {"l": (heads, None)},
        {"l.weight": torch.zeros(6, 2), "l.bias": torch.zeros(6), "n": torch.zeros(())},
    ) == {
        "l.weight": (heads, None),
        "l.bias": (heads,),
        "n": (),
    }


@pytest.mark.parametrize("statistics", ["shared", "per-size", "batch"])
def test_statistics_are_shared_or_a_size_has_its_own_or_there_are_none(statistics: str) -> None:
    federation = federation_of(
        *MODELS["basic"],
        f"split.normalization_statistics={statistics}",
        "split.channels=rolling",
        "training.steps=1",
    )
    server, record = federation.run_round(federation.initial_state())
    assert not record.refused and all(torch.isfinite(t).all() for t in server.state.values())
    assert {n: t.shape for n, t in federation.split.meta_state.items()} == {
        n: t.shape for n, t in server.state.items()
    }
    kept = [name for name in server.state if "running_" in name]
    assert any(kept) == (statistics != "batch")
    assert all(("/" in name) == (statistics == "per-size") for name in kept)
    if statistics == "per-size":
        assert server.state["resnet18-w0.5/bn1.running_var"].shape == (2,)


def test_group_norm_is_cut_where_its_groups_allow_it() -> None:
    group = ("model.resnet.norm=group", "model.resnet.groups=2", "model.sizes=['resnet10']")
    split = split_of(*group, "model.resnet.width=0.25", "split.rates=[1,0.5]")
    assert split.build("resnet10-w0.5")(images()).shape == (3, 10)
    with pytest.raises(
        MotleyError, match=r"3 channels do not divide into the 2 groups of a group norm"
    ):
        split_of(*group, "split.rates=[0.75]")


# ---- assignment of sizes


def test_dynamic_sizes_are_redrawn_every_round_and_keep_their_shares() -> None:
    shares = (
        "federation.clients=8",
        "federation.size_fractions=[1,2,0,1]",
        "federation.size_assignment=dynamic",
    )
    config = tiny_config(
        "split.name=width", f"split.rates={list(RATES)}", "model.sizes=['mlp2']", *shares
    )
    rounds = [assign_sizes(config, number) for number in range(1, 6)]
    assert len(set(rounds)) > 1 and assign_sizes(config, 3) == rounds[2]
    for sizes in rounds:
        assert [sizes.count(f"mlp2-w{rate:g}") for rate in RATES] == [2, 4, 0, 2]
    federation = Federation(config)
    jobs = [federation.job(federation.initial_state(), 2, client) for client in range(8)]
    assert tuple(job.size for job in jobs) == rounds[1]
    assert tuple(federation.size_of(client, 1) for client in range(8)) == rounds[0]


# ---- rejected settings


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.sizes=['resnet10','resnet18']",), "takes exactly one architecture"),
        (
            ("method.name=scaffold", "split.channels=rolling"),
            "split.channels = 'rolling' changes their parts from round to round",
        ),
        (
            ("method.name=feddyn", "federation.size_assignment=dynamic"),
            "federation.size_assignment = 'dynamic' changes their parts",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(MotleyError, match=words):
        Federation(
            tiny_config(
                "split.name=width", "model.sizes=['mlp2']", "split.rates=[1,0.5]", *overrides
            )
        )


def test_wrong_rates_are_refused_by_name() -> None:
    assert "split.rates.1 = 1.5" in refused("split.name=width", "split.rates=[1,1.5]")
    assert "there must be at least one rate, and no rate twice" in refused(
        "split.name=width", "split.rates=[0.5,0.5]"
    )
    assert "has no effect with split.name = 'depth'" in refused(
        "split.name=depth", "split.rates=[1]"
    )
    assert "2 fractions are needed" in refused(
        "split.name=width", "split.rates=[1,0.5]", "federation.size_fractions=[1]"
    )


def test_another_split_drops_the_old_ones_settings_and_keeps_the_common_one() -> None:
    config = load_config(overrides=["split.name=width"])
    assert config.split.normalization_statistics == "per-size"  # of the quickstart
    assert config.split.sizes(("mlp2",)) == tuple(
        f"mlp2-w{rate}" for rate in ("1", "0.5", "0.25", "0.125", "0.0625")
    )
