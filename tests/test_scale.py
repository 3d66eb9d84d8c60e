"""What a federation keeps depends on the clients that played, not on those that exist. Seconds: benchmarks/scale.py."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from motley.config import Config, load_config
from motley.core.part import State, size_in_bytes
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.methods import METHODS, ClientAlgorithm, Method, Requirements, Step
from motley.runs.callbacks import SaveCheckpoints

CLIENTS, A_ROUND = 10_000, 200
MEBIBYTE = 2**20


class KeepingClient(ClientAlgorithm):
    """Every client keeps its last weights."""

    def initial_client_state(self, size: str, received: State) -> State:
        return received

    def finish(self, step: Step) -> tuple[State, State]:
        return {}, step.state


class Keeping(Method):
    """FedAvg with a client state."""

    Client = KeepingClient
    requirements = Requirements(client_state=True)


@pytest.fixture(scope="module", autouse=True)
def keeping() -> Iterator[None]:
    METHODS.register("keeping", "made up for tests")(Keeping)
    yield
    del METHODS._entries["keeping"]


@pytest.fixture(scope="module")
def data() -> Dataset:
    numbers = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        return Examples(
            numbers.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8), np.arange(count) % 10
        )

    return Dataset("noise", examples(4 * CLIENTS), examples(100), 10)


def config(method: str, clients: int = CLIENTS, *overrides: str) -> Config:
    return load_config(
        overrides=[
            f"method.name={method}",
            f"federation.clients={clients}",
            f"federation.clients_per_round={A_ROUND}",
            "federation.size_assignment=alternate",
            "model.sizes=['mlp1','mlp2','mlp3']",
            "data.transform.resize=0",
            "training.batch_size=4",
            "training.steps=1",
            "engine.device=cpu",
            *overrides,
        ]
    )


def checkpoint_bytes(folder: Path, data: Dataset, method: str, clients: int) -> int:
    """Play one round with the same clients, however many there are, and return what its checkpoint weighs."""
    federation = Federation(config(method, clients), dataset=data, memory_folder=folder / "clients")
    federation.sample = lambda number, attempt=0: list(range(A_ROUND))
    keeper = SaveCheckpoints(folder / "checkpoints", every=1, keep=1)
    keeper.on_start(federation, federation.initial_state())
    keeper.on_round(*federation.run_round(federation.initial_state()))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("method", ["fedavg", "keeping"])
def test_clients_that_never_played_weigh_nothing_in_a_checkpoint(
    tmp_path: Path, data: Dataset, method: str
) -> None:
    few = checkpoint_bytes(tmp_path / "few", data, method, 2 * A_ROUND)
    many = checkpoint_bytes(tmp_path / "many", data, method, CLIENTS)
    # The configuration is kept with a checkpoint, and its `federation.clients` has more digits.
    assert many - few == len(str(CLIENTS)) - len(str(2 * A_ROUND))


def test_memories_in_host_memory_are_bounded_and_as_large_as_their_parts(
    tmp_path: Path, data: Dataset
) -> None:
    federation = Federation(
        config("keeping", CLIENTS, "engine.client_state_host_gib=0.001"),
        dataset=data,
        memory_folder=tmp_path,
    )
    store = federation.engine.clients.memory  # type: ignore[attr-defined]
    held: list[int] = []
    server = federation.initial_state()
    for _ in range(3):
        server, record = federation.run_round(server, lambda client: held.append(store.held_bytes))
        assert not record.refused and not record.idle
    assert len(held) == 3 * A_ROUND
    assert 0.9 * MEBIBYTE < max(held) <= 0.001 * 2**30
    federation.engine.save_memory(server.client_state_rounds)
    assert len(server.client_state_rounds) > 2.8 * A_ROUND
    parts = {
        size: size_in_bytes(federation.split.build(size).state_dict())
        for size in federation.split.sizes
    }
    with sqlite3.connect(tmp_path / "client_states.sqlite") as database:
        lengths = dict(
            database.execute(
                "SELECT client, sum(length(content)) FROM client_states GROUP BY client, round"
            )
        )
    assert lengths.keys() == server.client_state_rounds.keys()
    assert all(
        0 <= length - parts[federation.sizes[client]] < 1000 for client, length in lengths.items()
    )


def test_ten_thousand_clients_hold_every_example_once(data: Dataset) -> None:
    partition = Federation(config("fedavg"), dataset=data).partition
    assert len(partition) == CLIENTS
    assert partition.sizes.min() >= 1
    assert np.array_equal(np.sort(partition.indices), np.arange(4 * CLIENTS))


def test_a_client_costs_a_federation_some_hundred_bytes(data: Dataset) -> None:
    def peak(clients: int) -> int:
        tracemalloc.start()
        federation = Federation(config("fedavg", clients), dataset=data)
        federation.sample(1)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2 * A_ROUND)
    assert peak(CLIENTS) - peak(2 * A_ROUND) < 1000 * CLIENTS
