"""What clients remember is filed under client and round, and the round that counts is the server's word."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from motley.client import state_store as module
from motley.client.state_store import PER_STATE, PER_TENSOR, ClientStateStore
from motley.core.errors import MotleyError

CPU = torch.device("cpu")


def memory(value: float) -> dict[str, Tensor]:
    return {"own": torch.full((2, 3), float(value)), "turns": torch.tensor(int(value))}


A_MEMORY = 2 * 3 * 4 + 8 + 2 * PER_TENSOR + PER_STATE
"""Bytes of one."""


def value(found: dict[str, Tensor]) -> float:
    """Return what a memory was made from."""
    number = found["own"][0, 0].item()
    assert torch.equal(found["own"], torch.full((2, 3), number))
    assert found["turns"].dtype == torch.int64
    assert found["turns"].item() == number
    return number


def filed(folder: Path) -> set[tuple[int, int]]:
    """Return which memories (client, round) are durable, as another process sees them."""
    path = folder / "client_states.sqlite"
    if not path.exists():
        return set()
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        return set(database.execute("SELECT client, round FROM client_states"))


def test_a_memory_is_found_by_client_and_round(tmp_path: Path) -> None:
    for store in stores(tmp_path):
        for client, number in ((0, 1), (0, 2), (7, 1)):
            store.put(client, number, memory(10 * client + number))
        assert [value(store.get(*which)) for which in ((0, 1), (0, 2), (7, 1))] == [1, 2, 71]
    assert not any(map(filed, tmp_path.iterdir())), "nothing is durable before a checkpoint is made"


def stores(folder: Path) -> list[ClientStateStore]:
    """Return a store of each kind: with and without a folder, and room on the device and in host memory."""
    return [
        ClientStateStore(where and where / f"{most} {near}", most, near, CPU)
        for where in (None, folder)
        for most in (0, 2**20)
        for near in (0, A_MEMORY, 2**20)
    ]


def test_a_memory_is_a_copy(tmp_path: Path) -> None:
    for store in stores(tmp_path):
        live = memory(1)
        live["own"].requires_grad_()
        store.put(0, 1, live)
        with torch.no_grad():
            live["own"].fill_(5)
        found = store.get(0, 1)
        assert value(found) == 1
        assert not found["own"].requires_grad


def test_a_store_may_be_collected_in_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's worker has a second thread, in which Python may collect garbage."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    stores = [ClientStateStore(tmp_path)]
    stores[0].put(0, 1, {"w": torch.ones(2)})
    stores[0].save({0: 1})
    thread = threading.Thread(target=stores.clear)
    thread.start()
    thread.join()
    assert not ignored


def test_names_come_in_one_order_wherever_they_were(tmp_path: Path) -> None:
    """Safetensors gives names back in any order, and rooms for memories are made by names and shapes."""
    names = "hbgdcafe"
    for store in stores(tmp_path):
        for client in range(5):
            store.put(client, 1, {name: torch.zeros(1) for name in names})
            assert list(store.get(client, 1)) == sorted(names)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for store in stores(tmp_path):
        store.put(3, 1, memory(1))
        with pytest.raises(MotleyError, match="client 3 after round 2 is missing"):
            store.get(3, 2)


@pytest.mark.parametrize("content", [b"garbage", b"\xff" * 10_000])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "client_states.sqlite").write_bytes(content)
    with pytest.raises(
        MotleyError, match=r"client_states\.sqlite cannot be opened: file is not a database"
    ):
        ClientStateStore(tmp_path).get(3, 2)


def test_a_broken_memory_is_named(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.put(3, 2, memory(1))
    store.save({3: 2})
    with sqlite3.connect(tmp_path / "client_states.sqlite") as database:
        database.execute("UPDATE client_states SET content = ?", (b"garbage",))
    with pytest.raises(MotleyError, match="client 3 after round 2 is damaged"):
        ClientStateStore(tmp_path).get(3, 2)


def _saved(folder: Path) -> ClientStateStore:
    store = ClientStateStore(folder)
    for client in (3, 4):
        store.put(client, 2, memory(client))
    store.save({3: 2, 4: 2})
    return store


@pytest.mark.parametrize(
    "statement",
    [
        # The last byte belongs to the last tensor, and changes its value.
        "UPDATE client_states SET content = substr(content, 1, length(content) - 1) || x'7f'",
        "UPDATE client_states SET client = 7 - client",
        "UPDATE client_states SET round = 1",
        "UPDATE client_states SET sha256 = x'00'",
        "UPDATE client_states SET content = x''",
        "UPDATE client_states SET content = 3",
        "DELETE FROM client_states",
    ],
)
def test_a_state_that_was_changed_or_moved_in_the_file_is_noticed(
    tmp_path: Path, statement: str
) -> None:
    _saved(tmp_path)
    ClientStateStore(tmp_path).check({3: 2, 4: 2})
    with sqlite3.connect(tmp_path / "client_states.sqlite") as database:
        # Two clients are exchanged in two steps, because their keys must differ.
        for step in (statement.replace("7 - client", "client + 10"), statement):
            database.execute(step.replace("7 - client", "17 - client"))
    for read in (lambda store: store.get(3, 2), lambda store: store.check({3: 2})):
        with pytest.raises(MotleyError, match=r"client 3 after round 2 is (damaged|missing)"):
            read(ClientStateStore(tmp_path))


def test_the_file_of_an_earlier_version_is_upgraded(tmp_path: Path) -> None:
    """It has other names and no checksums."""
    _saved(tmp_path)
    old = tmp_path / "memories.sqlite"
    (tmp_path / "client_states.sqlite").rename(old)
    with sqlite3.connect(old) as database:
        database.execute("ALTER TABLE client_states DROP COLUMN sha256")
        database.execute("ALTER TABLE client_states RENAME TO memories")
    old.chmod(0o644)
    store = ClientStateStore(tmp_path)
    store.check({3: 2, 4: 2})
    assert value(store.get(4, 2)) == 4
    store.put(3, 5, memory(35))
    store.save({3: 5})
    assert [path.name for path in tmp_path.iterdir()] == ["client_states.sqlite"]
    assert (tmp_path / "client_states.sqlite").stat().st_mode & 0o777 == 0o600
    later = ClientStateStore(tmp_path)
    assert [value(later.get(3, 5)), value(later.get(3, 2))] == [35, 3]
    with sqlite3.connect(tmp_path / "client_states.sqlite") as database:
        rows = database.execute("SELECT round, sha256 IS NULL FROM client_states WHERE client = 3")
        assert dict(rows.fetchall()) == {2: 1, 5: 0}


def test_a_kill_while_an_old_file_is_upgraded_loses_nothing(tmp_path: Path) -> None:
    """The table has its new name by then, and the file its old one."""
    _saved(tmp_path)
    (tmp_path / "client_states.sqlite").rename(tmp_path / "memories.sqlite")
    assert value(ClientStateStore(tmp_path).get(4, 2)) == 4


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_may_read_client_states(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = tmp_path / "run" / "clients"
        store = ClientStateStore(folder, host_limit=0)
        store.put(0, 1, memory(1))  # written at once, in a transaction with a journal
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == dict.fromkeys(
            ("client_states.sqlite", "client_states.sqlite-journal"), 0o600
        )
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_an_empty_memory_takes_no_room(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.put(0, 1, {})
    store.save({0: 1})
    store.forget_older({0: 1})
    assert list(tmp_path.iterdir()) == []


# ---- how much is held


@pytest.mark.parametrize("near", [0, 3 * A_MEMORY])
@pytest.mark.parametrize("folder", [True, False])
def test_memory_is_bounded_and_nothing_is_lost(tmp_path: Path, folder: bool, near: int) -> None:
    store = ClientStateStore(tmp_path if folder else None, 5 * A_MEMORY, near, CPU)
    for number in range(1, 4):
        for client in range(20):
            store.put(client, number, memory(100 * number + client))
            assert (
                store.host_bytes == sum(map(module._bytes, store._in_host.values())) <= 5 * A_MEMORY
            )
            assert store.device_bytes == sum(map(module._bytes, store._on_device.values())) <= near
            assert not store._on_device.keys() & store._in_host.keys()
    for number in range(1, 4):
        assert [value(store.get(client, number)) for client in range(20)] == [
            100 * number + c for c in range(20)
        ]
    store.save({client: 3 for client in range(20)})
    assert [value(store.get(client, 3)) for client in range(20)] == [
        300 + client for client in range(20)
    ]
    store.forget_older({client: 3 for client in range(20)})
    assert store.host_bytes <= 5 * A_MEMORY and store.device_bytes <= near
    for client in range(20):
        with pytest.raises(MotleyError, match="missing"):
            store.get(client, 2)


def test_a_run_without_checkpoints_keeps_two_of_a_client(tmp_path: Path) -> None:
    """Else a long run would fill the GPU, then the host, then the disk with what nobody will ask for."""
    for store in stores(tmp_path):
        for number in range(1, 20):
            store.put(0, number, memory(number))
            assert value(store.load(0, number)) == number
            assert value(store.get(0, max(1, number - 1))) == max(1, number - 1), (
                "the round may yet be lost"
            )
            assert store.device_bytes + store.host_bytes <= 2 * A_MEMORY
        store.put(0, 20, memory(20))
        assert value(store.load(0, 19)) == 19, "round 20 was lost"
        with pytest.raises(MotleyError, match="after round 17 is missing"):
            store.get(0, 17)


def test_a_refused_memory_does_not_take_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Round 5 was refused. When round 7 is lost after round 8 has begun, the server names round 2 again."""
    store = ClientStateStore(tmp_path, device_limit=2**20, device=CPU)
    store.put(0, 2, memory(2))
    for made in (5, 7):
        for _ in range(2):  # a turn may ask twice
            assert value(store.load(0, 2)) == 2
        store.put(0, made, memory(made))
    for _ in range(2):
        assert value(store.load(0, 7)) == 7
    store.save({0: 2})
    assert value(ClientStateStore(tmp_path).get(0, 2)) == 2
    with pytest.raises(MotleyError, match="after round 5 is missing"):
        store.get(0, 5)


def test_what_a_checkpoint_names_outlives_newer_ones(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, device_limit=2**20, device=CPU)
    store.put(0, 1, memory(1))
    store.save({0: 1})
    for number in range(2, 6):
        store.put(0, number, memory(number))
        store.load(0, number)
    assert value(ClientStateStore(tmp_path).get(0, 1)) == value(store.get(0, 1)) == 1


def test_a_memory_that_is_put_again_counts_once(tmp_path: Path) -> None:
    for most in (2 * A_MEMORY, A_MEMORY, 0):
        store = ClientStateStore(tmp_path, most)
        for attempt in range(5):
            for client in (0, 1):
                store.put(client, 1, memory(10 * attempt + client))
            assert store.host_bytes == most
            assert [value(store.get(client, 1)) for client in (0, 1)] == [
                10 * attempt,
                10 * attempt + 1,
            ]


def test_a_memory_may_be_larger_than_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    store = ClientStateStore(tmp_path, host_limit=0)
    for length in (1000, 10):
        values = torch.randn(length)
        store.put(0, 1, {"values": values})
        store.save({0: 1})
        assert torch.equal(ClientStateStore(tmp_path).get(0, 1)["values"], values)


def test_deleted_room_is_used_again(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, host_limit=0)
    sizes = []
    for number in range(1, 20):
        for client in range(20):
            store.put(client, number, {"values": torch.randn(10_000)})
        store.save(dict.fromkeys(range(20), number))
        store.forget_older(dict.fromkeys(range(20), number))
        sizes.append((tmp_path / "client_states.sqlite").stat().st_size)
    assert sizes[-1] == sizes[2] < 3 * 20 * 40_000


# ---- saved


def test_saved_memories_outlive_the_process(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    store.put(0, 1, memory(1))
    store.put(7, 2, memory(72))
    store.save({0: 1, 7: 2})
    later = ClientStateStore(tmp_path)
    assert (value(later.get(0, 1)), value(later.get(7, 2))) == (1, 72)


def test_every_bit_is_saved_whatever_the_layout(tmp_path: Path) -> None:
    """On a GPU weights are channels last; a memory may be a view, and two names may be one tensor."""
    image = torch.randn(2, 3, 4, 5)
    strange = {
        "channels last": image.to(memory_format=torch.channels_last),
        "turned": image.transpose(0, 3),
        "same": image,
        "again": image,
        "half": image.to(torch.bfloat16),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "flag": torch.tensor(True),
    }
    store = ClientStateStore(tmp_path)
    store.put(0, 1, strange)
    store.save({0: 1})
    for found in (store.get(0, 1), ClientStateStore(tmp_path).get(0, 1)):
        assert found.keys() == strange.keys()
        for name, tensor in strange.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name
    assert (
        ClientStateStore(tmp_path).get(0, 1)["odd"].signbit().tolist()
        == strange["odd"].signbit().tolist()
    )


def test_only_the_named_round_is_written_and_once(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    for number in (1, 2, 3):
        store.put(0, number, memory(number))
    store.put(1, 3, memory(13))
    store.save({0: 2})
    assert filed(tmp_path) == {(0, 2)}
    written = (tmp_path / "client_states.sqlite").stat().st_mtime_ns
    store.save({0: 2})
    assert (tmp_path / "client_states.sqlite").stat().st_mtime_ns == written
    store.save({0: 3, 1: 3})
    assert filed(tmp_path) == {(0, 2), (0, 3), (1, 3)}


def test_saving_drops_older_ones_from_memory_and_keeps_newer(tmp_path: Path) -> None:
    for store in (ClientStateStore(), ClientStateStore(tmp_path)):
        for number in (1, 2, 3):
            store.put(0, number, memory(number))
        store.put(1, 1, memory(11))
        store.save({0: 2})
        assert value(store.get(0, 2)) == 2
        assert value(store.get(0, 3)) == 3
        assert value(store.get(1, 1)) == 11, (
            "a client the server does not name yet keeps what it has"
        )
        with pytest.raises(MotleyError, match="missing"):
            store.get(0, 1)


def test_a_file_of_a_round_that_was_never_completed_is_replaced(tmp_path: Path) -> None:
    before = ClientStateStore(tmp_path)
    before.put(0, 4, memory(66))
    before.save({0: 4})
    after = ClientStateStore(tmp_path)
    after.put(0, 4, memory(4))
    assert value(after.get(0, 4)) == 4
    after.save({0: 4})
    assert value(ClientStateStore(tmp_path).get(0, 4)) == 4


def test_a_resumed_store_saves_what_it_did_not_touch(tmp_path: Path) -> None:
    """Most clients are not in most rounds: their files stay, unread and unwritten."""
    first = ClientStateStore(tmp_path)
    first.put(0, 1, memory(1))
    first.put(1, 1, memory(11))
    first.save({0: 1, 1: 1})
    second = ClientStateStore(tmp_path)
    second.put(1, 2, memory(12))
    second.save({0: 1, 1: 2})
    third = ClientStateStore(tmp_path)
    assert (value(third.get(0, 1)), value(third.get(1, 2))) == (1, 12)


# ---- crashes


@contextmanager
def failing(store: ClientStateStore, at: int, error: BaseException) -> Iterator[None]:
    """Raise at a store's n-th statement from here."""
    file = store._open(make=True)
    assert file is not None
    database, left = file._database, at

    class Failing:
        in_transaction = property(lambda _: database.in_transaction)

        def execute(self, *arguments: object) -> object:
            return self._do(database.execute, arguments)

        def executemany(self, *arguments: object) -> object:
            return self._do(database.executemany, arguments)

        def _do(self, do: object, arguments: tuple[object, ...]) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return do(*arguments)  # type: ignore[operator]

    file._database = Failing()  # type: ignore[assignment]
    try:
        yield
    finally:
        file._database = database


@pytest.mark.parametrize("most", [0, 2 * A_MEMORY, 2**20])
@pytest.mark.parametrize("at", range(1, 10))
def test_an_interruption_loses_nothing(tmp_path: Path, most: int, at: int) -> None:
    """Ctrl-C in the middle of a round, or of a save: the run then saves the round before, and that must be there."""
    store = ClientStateStore(tmp_path, most)
    rounds = dict.fromkeys(range(4), 1)
    for client in rounds:
        store.put(client, 1, memory(10 + client))
    with failing(store, at, KeyboardInterrupt()):
        try:
            for client in rounds:
                store.put(client, 2, memory(20 + client))
            store.save(rounds)
        except KeyboardInterrupt:
            pass
    store.save(rounds)
    later = ClientStateStore(tmp_path)
    assert [value(later.get(client, 1)) for client in rounds] == [10, 11, 12, 13]


def test_what_a_full_disk_took_back_is_never_named_by_a_checkpoint(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path, host_limit=0)
    store.put(0, 1, memory(1))
    store.save({0: 1})
    store.put(0, 2, memory(2))
    with failing(store, 2, sqlite3.OperationalError("database or disk is full")):
        store._file._database.execute("ROLLBACK")  # type: ignore[union-attr]
        with pytest.raises(
            MotleyError, match=r"client_states\.sqlite cannot be written: database or disk is full"
        ):
            store.put(1, 2, memory(12))
    with pytest.raises(MotleyError, match="the client states since the last checkpoint are lost"):
        store.save({0: 2})
    assert value(ClientStateStore(tmp_path).get(0, 1)) == 1


def _live(folder: Path, tell: Connection) -> None:
    """Put, save and forget as runs do, and say which rounds are saved."""
    store = ClientStateStore(folder, host_limit=3 * A_MEMORY)
    for number in range(1, 10**6):
        for client in range(10):
            store.put(client, number, memory(10 * number + client))
        store.save(dict.fromkeys(range(10), number))
        tell.send(number)
        store.forget_older(dict.fromkeys(range(10), number - 1))


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Every memory of the last save, and of the one before it, is whole."""
    process_of = multiprocessing.get_context("fork")
    ear, mouth = process_of.Pipe(duplex=False)
    process = process_of.Process(target=_live, args=(tmp_path, mouth))
    process.start()
    saved = ear.recv()
    time.sleep(random.Random(seed).uniform(0, 0.1))
    process.kill()
    process.join()
    while ear.poll():
        saved = ear.recv()
    store = ClientStateStore(tmp_path)
    for number in {max(saved - 1, 1), saved}:
        assert [value(store.get(client, number)) for client in range(10)] == [
            10 * number + c for c in range(10)
        ]
    store.put(0, saved + 1, memory(1))
    store.save({0: saved + 1})
    assert value(ClientStateStore(tmp_path).get(0, saved + 1)) == 1


# ---- forgotten


def test_forgetting_deletes_what_is_older_than_named(tmp_path: Path) -> None:
    store = ClientStateStore(tmp_path)
    for number in (1, 9, 10, 11):
        store.put(0, number, memory(number))
        store.put(1, number, memory(number))
        store.save({0: number, 1: number})
    store.forget_older({0: 10})
    everything = {(1, 1), (1, 9), (1, 10), (1, 11)}
    assert filed(tmp_path) == {(0, 10), (0, 11)} | everything, (
        "a client that is not named keeps all"
    )
    store.forget_older({0: 11, 1: 9, 5: 3})
    assert filed(tmp_path) == {(0, 11)} | everything - {(1, 1)}
    assert value(ClientStateStore(tmp_path).get(0, 11)) == 11


def test_a_new_process_forgets_what_an_older_one_left(tmp_path: Path) -> None:
    before = ClientStateStore(tmp_path)
    for number in (1, 2, 3):
        before.put(0, number, memory(number))
        before.save({0: number})
    ClientStateStore(tmp_path).forget_older({0: 3})
    assert filed(tmp_path) == {(0, 3)}


def test_there_may_be_nothing_to_forget(tmp_path: Path) -> None:
    ClientStateStore().forget_older({0: 1})
    ClientStateStore(tmp_path / "none").forget_older({0: 1})
    assert not (tmp_path / "none").exists()
