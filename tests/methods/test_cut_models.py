"""Methods that cut models, over families and parts where the cut is not the obvious one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.federation import Federation
from motley.methods.fedimpro import OWN
from motley.methods.fedin_pool import IN
from tests.methods.turns import after

PREACT = ("model.sizes=['heterofl-resnet18']", "model.preact.width=0.0625")
WIDTH = ("split.name=width", "split.rates=[1,0.5]", "training.steps=1")
SHARDS = "data.partition={name='shards'}"
REDRAWN = (
    "model.sizes=['mlp3']",
    "model.mlp.hidden=8",
    *WIDTH,
    "federation.size_assignment=dynamic",
)


@pytest.mark.parametrize("name", ["fedin", "fedimpro", "moon"])
def test_heterofls_network_is_cut_like_any_other(name: str) -> None:
    federation, server = after(2, *PREACT, *WIDTH, name=name)
    start = federation.initial_state().state
    assert all(
        not torch.equal(server.state[name], start[name]) for name in federation.split.parameters
    )


def test_a_client_whose_size_is_redrawn_gets_features_of_this_rounds_width() -> None:
    federation, server = after(3, *REDRAWN, name="fedin")
    widths = set()
    for number in range(4, 12):
        for client in range(6):
            job = federation.job(server, number, client)
            assert job.broadcast[IN].shape[1] == len(job.state["layers.0.bias"])
            widths.add((client, job.broadcast[IN].shape[1]))
    assert len(widths) == 12


def test_a_client_whose_size_is_redrawn_gets_statistics_of_this_rounds_width() -> None:
    federation, server = after(3, *REDRAWN, name="fedimpro")
    for number in range(4, 12):
        for client in range(6):
            job = federation.job(server, number, client)
            assert job.broadcast[f"{OWN}mean"].shape[1] == len(job.state["layers.0.bias"])


def test_classifier_rows_by_label_in_a_transformer_too() -> None:
    """Its class token is a parameter of no layer."""
    vit = (
        "model.sizes=['vit1']",
        "model.vit={patch=4, dim=12, heads=2}",
        "federation.clients_per_round=1",
        SHARDS,
    )
    federation, server = after(1, *vit, *WIDTH, name="heterofl")
    (client,) = federation.sample(1)
    held = set(federation.dataset.train.targets[federation.partition.of(client)].tolist())
    before = federation.initial_state().state["head.weight"]
    moved = {
        row for row in range(10) if not torch.equal(server.state["head.weight"][row], before[row])
    }
    assert moved == held and len(held) < 10


def without_momentum(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return a network whose BatchNorm looks at its number of batches when it trains."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


@pytest.mark.parametrize("name", ["fedimpro", "fedin", "fedgen", "fedproto"])
def test_a_model_may_look_at_values(name: str) -> None:
    """Shapes of features are computed without values where that is possible."""
    federation = Federation(
        models={"small": without_momentum},
        data="digits",
        method=name,
        training={"rounds": 1, "steps": 1},
        settings={"engine": {"device": "cpu", "workers": 1}},
    )
    _, record = federation.run_round(federation.initial_state())
    assert not record.refused
