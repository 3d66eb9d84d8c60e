"""Models that have a tensor under two names: the server treats it as one parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.server.state import ServerState


class Network(nn.Module):
    """A perceptron whose middle layer is used twice."""

    def __init__(self, num_classes: int, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(256, 8)
        self.middle = nn.Linear(8, 8)
        if tied:
            self.again = self.middle
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        again = self.again if hasattr(self, "again") else self.middle
        features = self.middle(self.first(images.flatten(1)).relu()).relu()
        logits: Tensor = self.head(again(features).relu())
        return logits


def tied(num_classes: int) -> Network:
    """Return a network with two names for one module."""
    return Network(num_classes)


def tied_weights(num_classes: int) -> Network:
    """Return a network with two modules that have the same parameters."""
    model = Network(num_classes)
    model.again = nn.Linear(8, 8)
    model.again.weight, model.again.bias = model.middle.weight, model.middle.bias
    return model


def plain(num_classes: int) -> Network:
    return Network(num_classes, tied=False)


class TiedHead(nn.Module):
    """A network of pixels' levels, whose last layer has the weights of the levels' embedding."""

    def __init__(self, num_classes: int, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(4, num_classes)
        self.embedding = nn.Embedding(num_classes, 4)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4 * 256, 4), nn.ReLU())
        if not head_first:
            self.head = nn.Linear(4, num_classes)
        self.head.weight = self.embedding.weight

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        levels = (9 * images.flatten(1)).round().clamp(0, 9).long()
        logits: Tensor = self.head(self.body(self.embedding(levels)))
        return logits


def embedding_first(num_classes: int) -> TiedHead:
    return TiedHead(num_classes)


def head_first(num_classes: int) -> TiedHead:
    return TiedHead(num_classes, head_first=True)


def second_name_of_the_head(num_classes: int) -> Network:
    """Return a network with two names for its last layer."""
    model = plain(num_classes)
    model.classifier = model.head
    return model


def trained(model: Any, method: Any, settings: dict[str, Any]) -> ServerState:
    federation = Federation(
        models={"one": model},
        data="digits",
        clients=4,
        clients_per_round=3,
        method=method,
        training={"rounds": 2, "steps": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
        settings={"engine": {"device": "cpu", "workers": 1}, **settings},
    )
    server = federation.initial_state()
    for _ in range(2):
        server, record = federation.run_round(server)
        assert not record.refused
    return server


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", {"server": {"lr": 0.5, "ema_decay": 0.5}}),
        ("fedavg", {"server": {"optimizer": {"name": "adam"}}}),
        ("fedavg", {"uplink": {"noise": 0.5}}),
        ("feddyn", {}),
        ("scaffold", {}),
        ("moon", {}),
        (
            {"name": "feddf", "steps": 2, "batch_size": 8},
            {"public": {"name": "noise", "samples": 32}},
        ),
    ],
    ids=str,
)
def test_a_second_name_changes_nothing(method: Any, settings: dict[str, Any]) -> None:
    """A network without the second name, which computes the same, ends with the same weights."""
    expected = trained(plain, method, settings).model
    for make in (tied, tied_weights):
        model = trained(make, method, settings).model
        for name, tensor in expected.items():
            assert torch.equal(model[name], tensor)
            if name.startswith("middle"):
                assert torch.equal(model[name.replace("middle", "again")], tensor)


def test_clients_in_one_step_are_not_for_tied_models() -> None:
    """They train one after the other, as with any other model that cannot be batched."""
    batched = trained(tied, "fedavg", {"engine": {"device": "cpu", "vmap_clients": 3}})
    alone = trained(tied, "fedavg", {})
    assert all(torch.equal(batched.state[name], tensor) for name, tensor in alone.state.items())


def test_one_of_two_names_cannot_be_private() -> None:
    with pytest.raises(MotleyError, match=r"'middle\.weight' and 'again\.weight'.*one tensor"):
        trained(tied, "fedavg", {"split": {"private": ["middle"]}})


@pytest.mark.parametrize("method", ["ccvr", "ccvr-prox", "ccvr-moon", "spherefed"])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            embedding_first,
            "'head.weight' of the last layer is the same tensor as 'embedding.weight'",
        ),
        (head_first, "'head.weight' of the last layer is the same tensor as 'embedding.weight'"),
        (second_name_of_the_head, "'head.weight' of the last layer is the same tensor as 'classif"),
    ],
)
def test_a_tied_last_layer_is_not_computed(method: str, make: Any, names: str) -> None:
    """The embedding would change with it, and so would the features that it was computed for."""
    with pytest.raises(MotleyError) as raised:
        trained(make, method, {})
    message = str(raised.value)
    assert (
        message.startswith(f"method.name = '{method}': computes the last layer")
        and names in message
    )
    trained(make, "fedavg", {})
