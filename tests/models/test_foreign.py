"""Networks that are not Motley's: what is inferred about each, and what can be trained with it.

The table is the issue's: six kinds of networks, and for each depth, width, InCo, FedIN and FedImpro,
or the reason why not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, Examples
from motley.federation import Federation
from motley.models.inputs import TokenShape
from tests.conftest import tiny_config

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
}
NETWORKS = ("resnet", "mobilenet", "vit", "bert", "lstm", "unet", "two_heads", "tutorial")
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
