"""Memory and files grow with the clients that took part, and by few bytes for each of them.

Times are not asserted here; benchmarks/scale.py measures them.
"""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from motley.client.state_store import ClientStateStore
from motley.config import Config, load_config
from motley.core.client_numbers import ClientNumbers
from motley.core.part import State, size_in_bytes
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.methods import METHODS, ClientAlgorithm, Method, Requirements, Step
from motley.runs.callbacks import SaveCheckpoints
from motley.runs.checkpoint import (
    checkpoints,
    read_checkpoint,
    read_metadata,
    save_checkpoint,
)
from motley.runs.folder import RunFolder
from motley.runs.integrity import changed_settings, data_checksums
from motley.server.state import ServerState

CLIENTS, A_ROUND = 10_000, 200
NATURAL_CLIENTS = 200_000
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
    federation = Federation(
        config(method, clients), dataset=data, client_state_folder=folder / "clients"
    )
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


def test_a_long_list_of_sizes_is_not_saved_with_every_checkpoint(
    tmp_path: Path, data: Dataset
) -> None:
    few = [f"mlp{1 + client % 2}" for client in range(CLIENTS)]
    listed = config("fedavg", CLIENTS, f"federation.sizes={few}")
    federation = Federation(listed, dataset=data)
    path = save_checkpoint(tmp_path, federation.initial_state(), keep=1, config=listed)
    assert (path / "server.json").stat().st_size < 20_000
    assert not changed_settings(RunFolder(tmp_path), read_metadata(path), listed)
    # A change of a client's size is found by the checksum of all sizes.
    other = config("fedavg", CLIENTS, f"federation.sizes={[*few[1:], few[0]]}")
    sizes = "sizes of the clients"
    changed = data_checksums(Federation(other, dataset=data))
    assert changed[sizes] != data_checksums(federation)[sizes]


def test_memories_in_host_memory_are_bounded_and_as_large_as_their_parts(
    tmp_path: Path, data: Dataset
) -> None:
    federation = Federation(
        config("keeping", CLIENTS, "engine.client_state_host_gib=0.001"),
        dataset=data,
        client_state_folder=tmp_path,
    )
    store = federation.engine.clients.states.store  # type: ignore[attr-defined]
    held: list[int] = []
    server = federation.initial_state()
    for _ in range(3):
        server, record = federation.run_round(server, lambda client: held.append(store.host_bytes))
        assert not record.refused and not record.idle
    assert len(held) == 3 * A_ROUND
    assert 0.9 * MEBIBYTE < max(held) <= 0.001 * 2**30
    federation.engine.save_client_states(server.client_state_rounds)
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


# ---- 200,000 natural clients


def natural_data(clients: int) -> Dataset:
    """Return tiny images of natural clients, most of which have one or two and some have sixty."""
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.zipf(1.8, clients), 60)
    owners = rng.permutation(np.repeat(np.arange(clients), counts))
    images = rng.integers(0, 256, (len(owners), 2, 2, 1), dtype=np.uint8)
    train = Examples(images, np.arange(len(owners)) % 10, owners)
    return Dataset("natural noise", train, train.rows(slice(100)), 10)


def natural_config(clients: int) -> Config:
    return config("fedavg", clients, "data.partition.name=natural", "model.mlp.hidden=4")


@pytest.fixture(scope="module")
def natural() -> Federation:
    return Federation(natural_config(NATURAL_CLIENTS), dataset=natural_data(NATURAL_CLIENTS))


def test_a_natural_client_costs_a_federation_few_bytes() -> None:
    """The partition, the sizes, the sampling and a round, for every client and its examples."""

    def peak(clients: int) -> int:
        data = natural_data(clients)
        tracemalloc.start()
        federation = Federation(natural_config(clients), dataset=data)
        federation.run_round(federation.initial_state())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few = NATURAL_CLIENTS // 20
    peak(few)  # what is imported and cached at the first time
    assert peak(NATURAL_CLIENTS) - peak(few) < 175 * (NATURAL_CLIENTS - few)


def test_natural_clients_hold_their_own_examples(natural: Federation) -> None:
    owners = natural.dataset.train.clients
    assert owners is not None and len(natural.partition) == NATURAL_CLIENTS
    holders = np.repeat(np.arange(NATURAL_CLIENTS), natural.partition.sizes)
    assert np.array_equal(owners[natural.partition.indices], holders)
    assert np.array_equal(np.sort(natural.partition.indices), np.arange(len(owners)))
    sizes = natural.partition.sizes
    assert sizes.min() == 1 and np.median(sizes) <= 2 and sizes.max() == 60


def after_participation(server: ServerState, clients: int) -> ServerState:
    """Return a server after a round in which so many clients took part."""
    everyone = np.arange(clients, dtype=np.int32)
    rounds = ClientNumbers.from_arrays(everyone, np.ones_like(everyone))
    return replace(server, round_number=1, client_state_rounds=rounds)


def test_a_client_that_took_part_costs_a_checkpoint_eight_bytes(
    tmp_path: Path, natural: Federation
) -> None:
    def written(clients: int) -> int:
        folder = tmp_path / str(clients)
        saver = SaveCheckpoints(folder, every=1, keep=1)
        server = natural.initial_state()
        saver.on_start(natural, server)
        saver.save(after_participation(server, clients))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    few = NATURAL_CLIENTS // 20
    # Two numbers of four bytes, and the digits of the tensors' lengths.
    assert written(NATURAL_CLIENTS) - written(few) <= 8 * (NATURAL_CLIENTS - few) + 100


def test_a_round_and_its_checkpoint_need_little_memory_after_everyone_took_part(
    tmp_path: Path, natural: Federation
) -> None:
    saver = SaveCheckpoints(tmp_path, every=1, keep=2)
    server = natural.initial_state()
    saver.on_start(natural, server)
    natural.run_round(server)
    server = after_participation(server, NATURAL_CLIENTS)
    tracemalloc.start()
    after, record = natural.run_round(server)
    saver.on_round(after, record)
    restored = read_checkpoint(checkpoints(tmp_path)[-1])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = dict.fromkeys(range(NATURAL_CLIENTS), 1) | dict.fromkeys(record.clients, 2)
    assert restored.client_state_rounds == after.client_state_rounds == expected
    assert most < 64 * NATURAL_CLIENTS


def test_the_limit_of_host_memory_holds_for_tiny_states_too(tmp_path: Path) -> None:
    """A tensor of a few numbers takes 20 times their memory.

    Only Python's part of that is traced here. It is about a quarter.
    """
    store = ClientStateStore(tmp_path, host_limit=MEBIBYTE)
    state = {f"layers.{number}.weight": torch.zeros(8) for number in range(6)}
    tracemalloc.start()
    for client in range(3_000):
        store.put(client, 1, state)
    store.save(dict.fromkeys(range(3_000), 1))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 2 * MEBIBYTE
    assert torch.equal(store.get(0, 1)["layers.5.weight"], torch.zeros(8))
