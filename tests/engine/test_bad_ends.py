"""Clients with hardly any data: they take the turns that the design promises, or none, and never break a round."""

from __future__ import annotations

import math

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.partition import Partition
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import to_line
from motley.server.state import ServerState
from tests.conftest import tiny_config

HELD = (0, 1, 2, 5, 8, 9)
"""How many examples the clients have; a batch has 8."""
MODELS = {
    "batch norm": ("model.sizes=['resnet10']",),
    "group norm": ("model.sizes=['resnet10']", "model.resnet.norm=group"),
    "no norm": ("model.sizes=['mlp1']",),
}
STEPS = {
    ("batch norm", False): [0, 0, 1, 1, 1, 1],
    ("batch norm", True): [0, 0, 1, 1, 1, 1],
    ("group norm", False): [0, 1, 1, 1, 1, 2],
    ("group norm", True): [0, 1, 1, 1, 1, 1],
    ("no norm", False): [0, 1, 1, 1, 1, 2],
    ("no norm", True): [0, 1, 1, 1, 1, 1],
}
"""Model and drop_last -> the steps of each client's turn."""

engines = pytest.mark.parametrize("engine", ["local", "debug"])
models = pytest.mark.parametrize("model", MODELS)


def dealt(*counts: int) -> Partition:
    """Return a partition in which client i has counts[i] examples."""
    return Partition(np.arange(sum(counts)), np.cumsum([0, *counts]))


def federate(engine: str, model: str, partition: Partition, *overrides: str) -> Federation:
    """Return a federation in which every client plays in every round."""
    clients = len(partition)
    return Federation(
        tiny_config(
            f"federation.clients={clients}",
            f"federation.clients_per_round={clients}",
            f"engine.name={engine}",
            "training.batch_size=8",
            "split.name=homogeneous",
            "split.normalization_statistics=shared",
            *MODELS[model],
            *overrides,
        ),
        partition=partition,
    )


def hashes(server: ServerState) -> list[object]:
    """Return everything about a server but its round."""
    return [
        fingerprint(server.state),
        fingerprint(server.ema or {}),
        server.method_state,
        server.client_state_rounds,
    ]


@engines
@models
@pytest.mark.parametrize("drop_last", [False, True])
def test_turns_of_clients_with_few_examples(engine: str, model: str, drop_last: bool) -> None:
    federation = federate(
        engine, model, dealt(*HELD), f"training.drop_last={str(drop_last).lower()}"
    )
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(len(HELD))]
    uploads = {
        upload.client: upload for upload in federation.engine.train(jobs, lambda client: None)
    }
    assert [uploads[c].num_steps if c in uploads else 0 for c in range(len(HELD))] == STEPS[
        model, drop_last
    ]
    assert all(
        upload.num_examples == HELD[client] and math.isfinite(upload.loss)
        for client, upload in uploads.items()
    )


@engines
@models
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_round_goes_on_without_those_who_cannot_train(
    engine: str, model: str, weights: str
) -> None:
    federation = federate(engine, model, dealt(*HELD), f"server.weighting={weights}")
    server = federation.initial_state()
    idle = [client for client, steps in enumerate(STEPS[model, False]) if not steps]
    able = [client for client in range(len(HELD)) if client not in idle]
    for number in (1, 2):
        server, record = federation.run_round(server)
        assert record.round_number == number
        assert record.clients == list(range(len(HELD)))
        assert record.idle == idle
        assert record.refused == {}
        assert math.isfinite(record.train_loss)
        assert record.bytes_up * len(HELD) == record.bytes_down * len(able)
        assert to_line(record)["idle"] == idle
    assert list(server.client_state_rounds) == able
    assert fingerprint(server.state) != fingerprint(federation.initial_state().state)
    assert all(tensor.isfinite().all() for tensor in server.state.values())


@models
def test_both_engines_agree(model: str) -> None:
    after = [
        federation.run_round(federation.initial_state())[0]
        for federation in (federate(engine, model, dealt(*HELD)) for engine in ("local", "debug"))
    ]
    assert fingerprint(after[0].state) == fingerprint(after[1].state)


@engines
def test_idle_clients_do_not_count(engine: str) -> None:
    """The mean is over those who trained: the same as if nobody else had been there."""
    with_idle = federate(engine, "batch norm", dealt(9, 12, 0, 1, 0))
    without = federate(engine, "batch norm", dealt(9, 12))
    after = [
        federation.run_round(federation.initial_state())[0] for federation in (with_idle, without)
    ]
    assert fingerprint(after[0].state) == fingerprint(after[1].state)


@engines
@pytest.mark.parametrize(
    ("model", "counts"),
    [("batch norm", (1, 0, 1)), ("group norm", (0, 0, 0)), ("no norm", (0, 0, 0))],
)
def test_a_round_in_which_all_are_idle_leaves_the_server_as_it_was(
    engine: str, model: str, counts: tuple[int, ...]
) -> None:
    federation = federate(engine, model, dealt(*counts), "server.ema_decay=0.9")
    start = federation.initial_state()
    server, records = start, []
    for _ in range(2):
        server, record = federation.run_round(server)
        records.append(record)
    assert server.round_number == 2
    assert hashes(server) == hashes(start)
    for number, record in enumerate(records, start=1):
        assert record.idle == record.clients == [0, 1, 2]
        assert record.bytes_up == 0 and record.bytes_down > 0
        assert record.scores, "the model that stayed is evaluated"
        line = to_line(record)
        assert (line["round"], line["idle"], line["train_loss"]) == (number, [0, 1, 2], None)


@engines
def test_all_idle_after_a_round_that_trained(engine: str) -> None:
    """The moving average and what clients remember stay as well."""
    federation = federate(engine, "batch norm", dealt(9, 9, 1, 0), "server.ema_decay=0.9")
    federation.sample = lambda number, attempt=0: [0, 1] if number == 1 else [2, 3]
    trained, _ = federation.run_round(federation.initial_state())
    after, record = federation.run_round(trained)
    assert hashes(after) == hashes(trained)
    assert trained.client_state_rounds == {0: 1, 1: 1}
    assert record.idle == [2, 3]


@engines
def test_who_has_no_example_is_not_asked_for_a_collection(engine: str) -> None:
    """Memory, messages, and a collection after the second round: a method that uses every hook."""
    federation = federate(engine, "batch norm", dealt(*HELD), "method.name=every-hook")
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(len(HELD))]
    assert [collection.client for collection in federation.engine.collect(jobs)] == [1, 2, 3, 4, 5]
    for _ in range(3):
        server, record = federation.run_round(server)
    assert record.idle == [0, 1]


@engines
def test_a_collection_that_nobody_answers_changes_nothing(engine: str) -> None:
    federation = federate(engine, "batch norm", dealt(0, 0, 0), "method.name=every-hook")
    server = start = federation.initial_state()
    for _ in range(2):
        server, _ = federation.run_round(server)
    assert fingerprint(server.state) == fingerprint(start.state)


@engines
@pytest.mark.parametrize(
    "settings", [("training.steps=5",), ("training.epochs=3",), ("training.epochs=0.1",)]
)
def test_one_example_again_and_again(engine: str, settings: tuple[str, ...]) -> None:
    federation = federate(engine, "no norm", dealt(1, 1), *settings)
    server, record = federation.run_round(federation.initial_state())
    assert record.idle == []
    assert all(tensor.isfinite().all() for tensor in server.state.values())


def test_a_partition_that_does_not_fit_is_refused() -> None:
    config = tiny_config()
    with pytest.raises(MotleyError, match=r"partition is of 2 clients; federation\.clients = 6"):
        Federation(config, partition=dealt(3, 3))
    for wrong in (-1, 10**6):
        with pytest.raises(MotleyError, match=r"samples that are not in 0\.\."):
            Federation(
                config, partition=Partition(np.array([0, wrong]), np.array([0, 2, 2, 2, 2, 2, 2]))
            )
