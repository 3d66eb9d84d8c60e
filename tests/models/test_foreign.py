"""Networks that are not Motley's: what is inferred about each, and what can be trained with it.

The kinds of networks in the table of docs/models.md, and for each depth, width, InCo, FedIN, FedImpro and MOON,
or the reason why not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.core.part import take
from motley.data.dataset import Dataset, Examples
from motley.federation import Federation
from motley.models.inputs import TokenShape
from motley.splits.exits import exit_logits_of
from tests.conftest import tiny_config
from tests.models import foreign

PATH = "tests.models.foreign"
TOKENS = TokenShape(6, 20)
SMALL_RUN = (
    "federation.clients=2",
    "federation.clients_per_round=2",
    "training.rounds=2",
    "training.steps=1",
    "evaluation.every=2",
)


def token_dataset() -> Dataset:
    numbers = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        tokens = numbers.integers(0, TOKENS.vocabulary, (count, TOKENS.length))
        return Examples(tokens, tokens[:, 0] % 10, input_shape=TOKENS)

    return Dataset("tokens", examples(60), examples(20), 10)


def federation(network: str, *settings: str, small: bool = False) -> Federation:
    sizes = [f"{PATH}:{network}_small"] * small + [f"{PATH}:{network}"]
    overrides = [f"model.sizes={sizes}", *SMALL_RUN, *settings]
    if network in ("bert", "lstm"):
        config = tiny_config(*overrides, "data.transform.resize=0")
        return Federation(config, dataset=token_dataset())
    return Federation(tiny_config(*overrides))


def train(trained: Federation) -> None:
    server = trained.initial_state()
    for _ in range(2):
        server, record = trained.run_round(server)
        assert not record.refused
        assert math.isfinite(record.train_loss)


#: What each network is trained with: settings, and whether there is a smaller size.
FEATURES = {
    "depth": (("split.name=depth",), True),
    "width": (("split.name=width", "split.rates=[1,0.5]", "method.name=heterofl"), False),
    "inco": (("split.name=depth", "server.inco.variant=paper"), True),
    "fedin": (("split.name=homogeneous", "method.name=fedin"), False),
    "fedimpro": (("split.name=homogeneous", "method.name=fedimpro"), False),
    "moon": (("split.name=homogeneous", "method.name=moon"), False),
}
NETWORKS = (
    *("resnet", "mobilenet", "regnet", "resnext", "vit", "bert", "lstm"),
    *("unet", "two_heads", "tutorial"),
)
NO_PAIRS = "no layers of one shape behind each other"
TUPLE = "returns a tuple"
#: Why a network cannot be trained with a feature. All others can.
REASONS = {
    ("unet", "inco"): NO_PAIRS,
    ("tutorial", "inco"): NO_PAIRS,
    **{("two_heads", feature): TUPLE for feature in FEATURES},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("network", NETWORKS)
def test_foreign_networks_train_or_say_why_not(network: str, feature: str) -> None:
    settings, two_sizes = FEATURES[feature]
    has_small = network not in ("unet", "two_heads")
    reason = REASONS.get((network, feature))
    if reason is not None:
        with pytest.raises(MotleyError, match=reason):
            federation(network, *settings, small=two_sizes and has_small)
        return
    trained = federation(network, *settings, small=two_sizes and has_small)
    if feature == "width":
        sizes = [trained.split.blueprints[size].module for size in trained.split.sizes]
        whole, narrow = (sum(p.numel() for p in module.parameters()) for module in sizes)
        assert narrow < 0.4 * whole
    if feature == "inco":
        assert trained.split.cross_layers
    train(trained)


@pytest.mark.parametrize(
    ("network", "layer"),
    [("regnet", "trunk_output.block2.block2-1.f.b.0"), ("resnext", "layer2.1.conv2")],
)
def test_narrow_grouped_convolutions_keep_all_groups(network: str, layer: str) -> None:
    """Half a width is half of each group, so that no channel changes its group."""
    split = federation(network, *FEATURES["width"][0]).split
    whole, narrow = (split.build(size).get_submodule(layer) for size in split.sizes)
    assert isinstance(whole, nn.Conv2d) and isinstance(narrow, nn.Conv2d)
    assert whole.groups > 1 and narrow.groups == whole.groups
    for dim in (0, 1):
        assert 2 * narrow.weight.shape[dim] == whole.weight.shape[dim]
    # A client gets the first half of each group's channels.
    state = split.initial(1)
    part = take(state, split.part(split.sizes[1]))
    inside = whole.weight.shape[1]
    groups = state[f"{layer}.weight"].unflatten(0, (whole.groups, inside))
    expected = groups[:, : inside // 2, : inside // 2].flatten(0, 1)
    assert torch.equal(part[f"{layer}.weight"], expected)


def test_groups_that_divide_the_same_channels_differently_are_named() -> None:
    with pytest.raises(
        MotleyError,
        match="3 groups of conv2d in layer 'three' and 4 groups of conv2d in layer 'four' divide "
        r"the same channels.*Declare ModelSpec\.channels",
    ):
        federation("unlike_groups", *FEATURES["width"][0])


@pytest.mark.parametrize("network", ["resnet", "vit"])
def test_exits_of_foreign_networks_are_nested_and_end_with_their_own_head(network: str) -> None:
    blocks = {"resnet": 4, "vit": 2}[network]
    trained = federation(
        network,
        "split.name=grid",
        f"split.cuts=[1,{blocks}]",
        "split.rates=[1,1]",
        "split.normalization_statistics=shared",
    )
    split = trained.split
    state = split.initial(1)
    images = torch.randn(3, 1, 8, 8)
    models = []
    for size in split.sizes:
        model = split.build(size).eval()
        model.load_state_dict(take(state, split.part(size)))
        models.append(model)
    small, large = (exit_logits_of(model, images) for model in models)
    assert len(small) == 1 and len(large) == 2 and torch.equal(small[0], large[0])
    plain = getattr(foreign, network)((1, 8, 8), 10).eval()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    assert torch.equal(plain(images), large[1])
    assert not any(name.startswith(("fc", "head")) for name in split.part(split.sizes[0]))


@pytest.mark.parametrize("network", ["mobilenet", "regnet"])
def test_foreign_networks_with_exits_train_in_depth_and_width(network: str) -> None:
    settings = ("split.name=grid", "split.cuts=[2,4]", "split.rates=[0.5,1]", "method.name=scalefl")
    train(federation(network, *settings))


def test_ordered_dropout_is_checked_on_inferred_channels() -> None:
    settings = ("split.name=ordered", "split.rates=[1,0.5]", "method.name=fjord")
    train(federation("tutorial", *settings))
    with pytest.raises(MotleyError, match="LSTM passes its units from position to position"):
        federation("lstm", *settings)
