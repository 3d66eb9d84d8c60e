"""Simulated attacks: who attacks, what is sent instead, and where the table is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motley.client.attack import ATTACKS, attackers
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.data import load_dataset
from motley.data.partition import Partition
from motley.federation import Federation
from motley.server.rounds import train_clients
from tests.conftest import tiny_config

#: Clients 0 to 3 of 6, all in every round, with BatchNorm.
SHORT = ("federation.clients_per_round=6", "training.steps=2", "training.rounds=2")


def deltas(*overrides: str, round_number: int = 1) -> dict[int, State]:
    """Return what clients send in a round, from the initial state on."""
    federation = Federation(tiny_config(*SHORT, *overrides))
    server = federation.initial_state()
    for _ in range(round_number - 1):
        server, _ = federation.run_round(server)
    attempt = train_clients(federation.context, server, 0, lambda client: None)
    return {update.client: update.delta for update in attempt.updates}


def is_buffer(name: str) -> bool:
    return "running" in name or "num_batches" in name


@pytest.mark.parametrize("factor", [-1.0, 10.0])
def test_sign_flip_and_scale(factor: float) -> None:
    attack = "sign-flip" if factor < 0 else "scale"
    honest = deltas()
    sent = deltas(f"attack={{name='{attack}', factor={abs(factor)}, clients=[1, 4]}}")
    for client in range(6):
        expected = factor if client in (1, 4) else 1.0
        for name, tensor in honest[client].items():
            if is_buffer(name):
                assert torch.equal(sent[client][name], tensor)
            else:
                torch.testing.assert_close(sent[client][name], expected * tensor)


def test_noise_has_the_size_that_was_asked_for() -> None:
    honest, sent = deltas(), deltas("attack={name='noise', factor=2.0, clients=[1]}")
    names = [name for name in honest[1] if not is_buffer(name)]
    noise = torch.cat([(sent[1][name] - honest[1][name]).flatten() for name in names])
    delta = torch.cat([honest[1][name].flatten() for name in names])
    size = float(delta.square().mean().sqrt())
    assert float(noise.std()) == pytest.approx(2 * size, rel=0.1)
    again = deltas("attack={name='noise', factor=2.0, clients=[1]}")
    assert all(torch.equal(again[1][name], sent[1][name]) for name in names)


def test_attackers_may_begin_later() -> None:
    settings = "attack={name='scale', factor=10.0, clients=[1], from_round=2}"
    honest, sent = deltas(), deltas(settings)
    assert all(torch.equal(sent[1][name], honest[1][name]) for name in honest[1])
    later, attacked = deltas(round_number=2), deltas(settings, round_number=2)
    name = next(name for name in later[1] if not is_buffer(name))
    torch.testing.assert_close(attacked[1][name], 10 * later[1][name])


def test_flipped_labels_are_those_of_the_attackers() -> None:
    digits = load_dataset("digits")
    config = tiny_config(*SHORT, "attack={name='label-flip', clients=[2]}")
    federation = Federation(config, dataset=digits)
    before = np.array(digits.train.targets)
    targets = federation.engine.clients.data.targets.numpy()  # type: ignore[union-attr]
    for client in range(6):
        rows = federation.partition.of(client)
        expected = 9 - before[rows] if client == 2 else before[rows]
        assert (targets[rows] == expected).all()
    # The data set is the caller's.
    assert (digits.train.targets == load_dataset("digits").train.targets).all()
    honest, sent = deltas(), deltas("attack={name='label-flip', clients=[2]}")
    assert all(torch.equal(honest[0][name], sent[0][name]) for name in honest[0])
    assert not all(torch.equal(honest[2][name], sent[2][name]) for name in honest[2])


def test_shared_examples_are_not_flipped() -> None:
    # Client 0 has examples 0 to 19, and client 1 has 10 to 29.
    indices = np.concatenate([np.arange(20), np.arange(10, 30), np.arange(30, 70)])
    shared = Partition(indices, np.array([0, 20, 40, 50, 60, 70, 80]))
    config = tiny_config(*SHORT, "attack={name='label-flip', clients=[0]}")
    with pytest.raises(MotleyError, match="client 1 holds examples of an attacker too"):
        Federation(config, partition=shared)


def test_a_fraction_is_drawn_by_the_seed() -> None:
    settings = ATTACKS.validate({"name": "sign-flip", "fraction": 0.2})
    drawn = [attackers(settings, 10, seed) for seed in range(20)]
    assert all(len(clients) == 2 for clients in drawn)
    assert len(set(drawn)) > 5
    assert drawn[3] == attackers(settings, 10, 3)
    assert attackers(ATTACKS.validate({}), 10, 1) == frozenset()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("attack={name='scale', clients=[6]}",), "client ids go from 0 to 5"),
        (("attack={name='scale'}",), "either clients or fraction should be given"),
        (("attack={name='scale', clients=[1], fraction=0.1}",), "either clients or fraction"),
        (("attack={name='scale', clients=[1, 1]}",), "should be different client ids"),
        (("attack={name='label-flip', clients=[1], factor=3}",), "it is for 'sign-flip'"),
        (("attack={name='steal', clients=[1]}",), "attack.name = 'steal': should be 'none'"),
        (("attack={name='scale', clients=[1]}", "engine.name=flower"), "runs clients as nodes"),
        (
            ("attack={name='scale', clients=[1]}", "method.name=fedproto", "server.ema_decay=0"),
            "exchanges no weights",
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(MotleyError) as error:
        tiny_config(*overrides)
    assert message in str(error.value)


def test_a_node_refuses_to_attack(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from motley.flower.failures import NodeError
    from motley.flower.run_config import from_text, to_text
    from motley.flower.settings import NodeSettings

    node = NodeSettings.model_validate({"client": 0})
    text = to_text(tiny_config("attack={name='scale', clients=[0]}"))
    with pytest.raises(NodeError, match="simulated clients only"):
        from_text(text, node)
    assert from_text(to_text(tiny_config()), node).attack.name == "none"


@pytest.mark.parametrize("defence", ["server.merge.name=median", "server.max_norm=auto"])
def test_defences_keep_accuracy_under_attack(defence: str) -> None:
    """One of ten equal clients scales its delta by 1,000, which makes the mean useless."""
    settings: list[Any] = [
        "model.sizes=['mlp1']",
        "split.name=homogeneous",
        "federation.clients=10",
        "federation.clients_per_round=10",
        "training.rounds=6",
        "training.epochs=2",
        "training.batch_size=32",
        "training.optimizer={name='sgd', lr=0.1, momentum=0.9}",
        "evaluation.every=6",
        "server.ema_decay=0",
        "engine.vmap_clients=10",
        "attack={name='scale', factor=-1000, clients=[3]}",
        "server.min_fraction=0",
        "server.max_step_factor=0",
    ]
    scores = []
    for more in ((), (defence,)):
        try:
            record = list(Federation(tiny_config(*settings, *more)).run())[-1]
            scores.append(record.accuracy or math.nan)
        except MotleyError:  # the mean may not even stay finite
            scores.append(0.0)
    assert scores[0] < 0.4 < 0.6 < scores[1]
