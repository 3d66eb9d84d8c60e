"""The clients' states between rounds: control variates, previous models, dual variables.

A state is stored under its client and the round that made it. The server says which round counts
(`Job.client_state_round`), so a round that was never completed has no effect: after a crash the
server names the older state, and the newer one is ignored or replaced.

There are three tiers. The newest states stay on the GPU they were made on, up to a limit, so that
no client waits for a copy to the host and back. Older ones are in host memory, up to another limit.
The others are in one SQLite file. All that is stored between two checkpoints is one transaction:
`save` ends it, and a crash rolls it back. One file is used because writing a thousand small ones
takes a second, and this takes hundredths of one. SQLite is used because it reuses the space of
deleted states; a log would have to be rewritten for that.

Every state in the file has a checksum over its client, its round and its content, which is verified
when it is read. States are derived from the clients' data, so only the file's owner may read them.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from motley.core.client_numbers import ClientNumbers, client_numbers
from motley.core.errors import MotleyError
from motley.core.part import State, by_type

#: Default limit of host memory for client states, in bytes.
HOST_LIMIT = 2**30
#: Bytes that an object of Python and torch takes beside a tensor's values, and a state beside its
#: tensors. For a state of a thousand parameters that is three quarters of its memory.
PER_TENSOR, PER_STATE = 550, 400
#: Bytes of a state in one row: SQLite's rows are limited to 10^9 bytes.
PIECE = 2**26
#: `ClientStateStore.check` reads at most this many bytes. Other states are verified when they are
#: needed.
MAX_CHECKED = 2**32
#: The file's name, and its name in earlier versions, whose states have no checksums.
FILE = "client_states.sqlite"
OLD_FILE = "memories.sqlite"


class ClientStateStore:
    """Client states by client and round.

    Up to `device_limit` bytes stay on `device`, up to `host_limit` bytes in host memory, and the
    others are in `folder`, or in a temporary file if there is none.
    """

    def __init__(
        self,
        folder: Path | None = None,
        host_limit: int = HOST_LIMIT,
        device_limit: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.path = folder / FILE if folder else None
        self.host_limit, self.device_limit, self.device = host_limit, device_limit, device
        self.host_bytes = self.device_bytes = 0
        #: States on the device by client and round, oldest first.
        self._on_device: dict[tuple[int, int], State] = {}
        #: Events after which the states on a GPU are complete there, by client and round.
        self._events: dict[tuple[int, int], torch.cuda.Event] = {}
        #: States in host memory by client and round, oldest first.
        self._in_host: dict[tuple[int, int], State] = {}
        #: The states in memory that are not in the file.
        self._unsaved: set[tuple[int, int]] = set()
        #: The states in the file that were written for lack of memory and are in no checkpoint yet.
        self._spilled: set[tuple[int, int]] = set()
        #: Client -> the rounds of its states that are in memory or in `_spilled`. A client whose
        #: states are all in the file and in a checkpoint has no entry here nor in `_named`, so that
        #: memory does not grow with the clients that have ever taken part.
        self._rounds: dict[int, list[int]] = {}
        #: Client -> the last two rounds that the server named; the first is None if it named one.
        self._named: dict[int, tuple[int | None, int]] = {}
        self._file: ClientStateFile | None = None
        #: The rounds of the last `_drop_older`, and of the last `forget_older`.
        self._kept, self._forgotten = ClientNumbers(), ClientNumbers()

    def put(self, client: int, round_number: int, state: Mapping[str, Tensor]) -> None:
        """Store a copy of a client's state after a round; the oldest states make room for it."""
        if not state:
            return
        key = client, round_number
        self._drop([key])
        self._unsaved.add(key)
        rounds = self._rounds.setdefault(client, [])
        if round_number not in rounds:
            rounds.append(round_number)
        if not self.device_limit or any(tensor.device != self.device for tensor in state.values()):
            self._store_in_host(key, state)
            return
        self._on_device[key] = _copied(state)
        self.device_bytes += _bytes(state)
        if self.device is not None and self.device.type == "cuda":
            self._events[key] = torch.cuda.current_stream(self.device).record_event()
        while self.device_bytes > self.device_limit:
            self._move_to_host(next(iter(self._on_device)))

    def _move_to_host(self, key: tuple[int, int]) -> None:
        """Move a state from the device to host memory.

        Slots have streams of their own. The slot that made this state may still be training its
        client when another slot needs the room, so the copy must wait for that slot's stream.
        """
        event = self._events.pop(key, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        state = self._on_device.pop(key)
        self.device_bytes -= _bytes(state)
        self._store_in_host(key, state)

    def _store_in_host(self, key: tuple[int, int], state: Mapping[str, Tensor]) -> None:
        self._in_host[key] = _on_host(state)
        self.host_bytes += _bytes(state)
        while self.host_bytes > self.host_limit:
            oldest = next(iter(self._in_host))
            if oldest in self._unsaved:
                self._write(oldest)
                self._spilled.add(oldest)
            self.host_bytes -= _bytes(self._in_host.pop(oldest))
            if oldest not in self._spilled:
                self._discard_round(*oldest)

    def load(self, client: int, round_number: int) -> State:
        """Return the state that a client starts a round with, and drop older ones.

        The previous state is kept: if the round that made this one is lost, the server asks for the
        previous one again.
        """
        before, now = self._named.get(client, (None, None))
        if now != round_number:
            before = now
            self._named[client] = before, round_number
        for number in list(self._rounds.get(client, [])):
            if number < round_number and number != before:
                self._drop([(client, number)])
        return self.get(client, round_number)

    def get(self, client: int, round_number: int) -> State:
        """Return a client's state after a round."""
        key = client, round_number
        if key in self._on_device:
            for tensor in self._on_device[key].values():
                if tensor.is_cuda:  # it may be dropped while this stream still reads it
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return self._on_device[key]
        if key in self._in_host:
            return self._in_host[key]
        file = self._open(make=False)
        state = file.read(client, round_number) if file else None
        if state is None:
            raise self._missing(client, round_number)
        return state

    def check(self, rounds: Mapping[int, int]) -> None:
        """Raise if one of the named states (client -> round) is missing or damaged.

        Called before a run continues: it can still go back to an older checkpoint then.
        """
        rounds = client_numbers(rounds)
        file = self._open(make=False)
        available = [client for client, number in self._on_device if rounds.get(client) == number]
        available += [client for client, number in self._in_host if rounds.get(client) == number]
        if file is not None:
            for client, number, size in file.sizes():
                if size and rounds.get(client) == number:
                    available.append(client)
        missing = rounds.clients[~np.isin(rounds.clients, available)]
        if len(missing):
            client = int(missing[0])
            raise self._missing(client, rounds[client])
        if file is not None:
            file.verify(rounds, MAX_CHECKED)

    def _missing(self, client: int, round_number: int) -> MotleyError:
        return MotleyError(
            f"{self.path or 'client states'}: the state of client {client} after round "
            f"{round_number} is missing."
        )

    def save(self, rounds: Mapping[int, int]) -> None:
        """Make the named states (client -> round) durable, and drop older ones that are not in the
        file.

        A state that an earlier process stored under the same name is replaced: the round it came
        from was never completed.
        """
        self._drop_older(rounds)
        if self.path is None:
            return
        for client, round_number in sorted(self._unsaved):
            if rounds.get(client) == round_number:
                self._write((client, round_number))
        spilled = list(self._spilled)
        self._spilled.clear()
        if self._file:
            self._file.commit()
        for key in spilled:
            if key not in self._on_device and key not in self._in_host:
                self._discard_round(*key)
        # The server names these rounds or later ones from now on.
        for client, (_, named) in list(self._named.items()):
            if named <= rounds.get(client, 0):
                del self._named[client]

    def forget_older(self, rounds: Mapping[int, int]) -> None:
        """Delete states of rounds before the named ones.

        For rounds that no kept checkpoint names any more.
        """
        self._drop_older(rounds)
        file = self._open(make=False)
        if file:
            rounds = client_numbers(rounds)
            file.delete_older(rounds.changed_since(self._forgotten).items())
            file.commit()
            self._forgotten = rounds

    def _drop_older(self, rounds: Mapping[int, int]) -> None:
        """Drop states in memory of rounds before the named ones.

        Only clients with another round than the last time are looked at: a state that is stored
        after a call is not older than the rounds that the call named.
        """
        if not self._rounds:
            return
        rounds = client_numbers(rounds)
        for client, oldest_kept in rounds.changed_since(self._kept).items():
            for round_number in list(self._rounds.get(client, [])):
                key = client, round_number
                in_memory = key in self._on_device or key in self._in_host
                if round_number < oldest_kept and in_memory:
                    self._drop([key])
        self._kept = rounds

    def _discard_round(self, client: int, round_number: int) -> None:
        """Forget that a state may be in memory."""
        rounds = self._rounds.get(client, [])
        if round_number in rounds:
            rounds.remove(round_number)
        if not rounds:
            self._rounds.pop(client, None)

    def _drop(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            self._discard_round(*key)
            self._unsaved.discard(key)
            self._events.pop(key, None)
            self.device_bytes -= _bytes(self._on_device.pop(key, {}))
            self.host_bytes -= _bytes(self._in_host.pop(key, {}))
            if key in self._spilled and self._file:
                self._file.delete(*key)
                self._spilled.discard(key)

    def _write(self, key: tuple[int, int]) -> None:
        file = self._open(make=True)
        assert file is not None
        state = self._in_host[key] if key in self._in_host else _on_host(self._on_device[key])
        file.write(*key, state)
        self._unsaved.discard(key)

    def _open(self, *, make: bool) -> ClientStateFile | None:
        """Return the file, or None if there is none yet and none is to be made."""
        if self._file is None and (make or self._exists()):
            self._file = ClientStateFile(self.path)
        return self._file

    def _exists(self) -> bool:
        if self.path is None:
            return False
        return self.path.exists() or self.path.with_name(OLD_FILE).exists()


class BorrowedStates(ClientStateStore):
    """The store of a worker process: one client's state, which another process has read.

    States that the client stores stay in memory, for the worker to send back.
    """

    def __init__(self, stored: State) -> None:
        super().__init__()
        self._stored = stored
        self._after: State = {}

    def put(self, client: int, round_number: int, state: Mapping[str, Tensor]) -> None:
        """Keep the client's state after the round.

        A copy: it may be the learner's own tensors, and the worker's next client uses the learner
        before this state is sent.
        """
        self._after = _copied(state)

    def load(self, client: int, round_number: int) -> State:
        """Return the state that the client starts the round with."""
        return self._stored

    def get(self, client: int, round_number: int) -> State:
        """Return the state after the round; empty if the client stored none."""
        return self._after


class ClientStateFile:
    """Client states in an SQLite file, or in a temporary one that ends with the process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lost = False
        with self._explained("opened"):
            if path is not None:
                _make_private(path)
            # One thread uses the connection, but a garbage collection in another one may close it.
            self._database = sqlite3.connect(
                path or "", isolation_level=None, check_same_thread=False
            )
            weakref.finalize(self, self._database.close)
            self._database.execute("PRAGMA page_size = 16384")
            self._database.execute("PRAGMA secure_delete = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS client_states "
                "(client INTEGER, round INTEGER, piece INTEGER, content BLOB, sha256 BLOB, "
                "PRIMARY KEY (client, round, piece))"
            )

    def write(self, client: int, round_number: int, state: State) -> None:
        """Store a state, in place of one of the same client and round."""
        content = memoryview(save(state))
        digest = _digest(client, round_number, content)
        rows = []
        for piece, start in enumerate(range(0, len(content), PIECE)):
            rows.append((client, round_number, piece, content[start : start + PIECE], digest))
        with self._changing():
            self._database.execute(
                "DELETE FROM client_states WHERE client = ? AND round = ?", (client, round_number)
            )
            self._database.executemany("INSERT INTO client_states VALUES (?, ?, ?, ?, ?)", rows)

    def read(self, client: int, round_number: int) -> State | None:
        """Return a state or None. Names are sorted, because safetensors keeps no order."""
        query = (
            "SELECT content, sha256 FROM client_states WHERE client = ? AND round = ? "
            "ORDER BY piece"
        )
        with self._explained("read"):
            rows = self._database.execute(query, (client, round_number)).fetchall()
            if not rows:
                return None
            try:
                content = b"".join(piece for piece, _ in rows)
                # States that an earlier version wrote have no checksum.
                digest = rows[0][1]
                if digest is not None and digest != _digest(client, round_number, content):
                    raise ValueError("its checksum is wrong")
                return dict(sorted(load(content).items()))
            except (SafetensorError, ValueError, TypeError) as error:
                raise self._damaged(client, round_number, error) from None

    def sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the client, the round and the bytes of the first piece of every state."""
        query = "SELECT client, round, length(content) FROM client_states WHERE piece = 0"
        with self._explained("read"):
            yield from self._database.execute(query)

    def verify(self, rounds: Mapping[int, int], limit: int) -> None:
        """Raise if one of the named states (client -> round) is damaged.

        States are read in the order of the file, up to `limit` bytes: a query for each of a million
        small states would take a minute. Of several damaged states, the first client's is named.
        """
        damaged = []
        query = "SELECT client, round, piece, content, sha256 FROM client_states"
        with self._explained("read"):
            for client, round_number, piece, content, digest in self._database.execute(query):
                limit -= len(content) if isinstance(content, bytes) else 0
                if limit < 0:
                    break
                if rounds.get(client) != round_number:
                    continue
                is_whole = isinstance(content, bytes) and piece == 0 and len(content) < PIECE
                if is_whole and digest is not None:
                    if digest != _digest(client, round_number, content):
                        damaged.append(client)
                elif piece == 0:
                    self.read(client, round_number)
        if damaged:
            client = min(damaged)
            raise self._damaged(client, rounds[client], "its checksum is wrong")

    def _damaged(self, client: int, round_number: int, reason: object) -> MotleyError:
        return MotleyError(
            f"{self.path or 'client states'}: the state of client {client} after round "
            f"{round_number} is damaged: {reason}."
        )

    def delete(self, client: int, round_number: int) -> None:
        """Delete a state."""
        with self._changing():
            self._database.execute(
                "DELETE FROM client_states WHERE client = ? AND round = ?", (client, round_number)
            )

    def delete_older(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Delete clients' states of rounds before the given ones."""
        with self._changing():
            self._database.executemany(
                "DELETE FROM client_states WHERE client = ? AND round < ?", rounds
            )

    def commit(self) -> None:
        """Make all changes so far durable."""
        if self._lost:
            raise MotleyError(
                f"{self.path}: the client states since the last checkpoint are lost, because the "
                "file could not be written."
            )
        if self._database.in_transaction:
            with self._explained("written"):
                self._database.execute("COMMIT")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the file in the transaction that `commit` ends; an interruption leaves it open."""
        with self._explained("written"):
            if not self._database.in_transaction:
                self._database.execute("BEGIN")
            yield

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Name the file that failed, and notice if SQLite rolled the whole transaction back.

        It may do that on a full disk.
        """
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._lost |= what == "written" and not self._database.in_transaction
            reason = getattr(error, "strerror", None) or error
            raise MotleyError(
                f"{self.path or 'the temporary file of client states'} cannot be {what}: {reason}."
            ) from None


def _digest(client: int, round_number: int, content: bytes | memoryview) -> bytes:
    """Return a state's checksum. It covers whose state it is, so that none can be exchanged."""
    digest = hashlib.sha256(f"{client}|{round_number}|".encode())
    digest.update(content)
    return digest.digest()


def _make_private(path: Path) -> None:
    """Create the file and its folder if necessary, and let only their owner read them.

    SQLite gives its journal the permissions of the file. A folder that exists may hold other files
    and keeps its permissions.
    """
    if not path.parent.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
    old = path.with_name(OLD_FILE)
    if old.is_file() and not path.exists():
        _upgrade(old, path)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with suppress(PermissionError):  # another user's file, which a group may write
        path.chmod(0o600)


def _upgrade(old: Path, path: Path) -> None:
    """Turn the file of an earlier version into one of this version.

    The name changes last, so that a kill at any moment leaves a file that is upgraded again. The
    first statement undoes what a killed process had not finished, for which SQLite needs the file
    under its old name.
    """
    with closing(sqlite3.connect(old, isolation_level=None)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "memories" in tables:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ALTER TABLE memories ADD COLUMN sha256 BLOB")
            database.execute("ALTER TABLE memories RENAME TO client_states")
            database.execute("COMMIT")
    old.rename(path)


def _on_host(state: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in sorted(state.items())
    }


def _copied(state: Mapping[str, Tensor]) -> State:
    """Return copies on the same device, made in one grouped call per type."""
    copies = {
        name: torch.empty_like(tensor, requires_grad=False)
        for name, tensor in sorted(state.items())
    }
    with torch.no_grad():
        for into, values in zip(
            by_type(copies.values()), by_type(state[name] for name in copies), strict=True
        ):
            if into:
                torch._foreach_copy_(into, values)
    return copies


def _bytes(state: Mapping[str, Tensor]) -> int:
    """Return the memory that a state takes, with all objects that it consists of."""
    if not state:
        return 0
    return PER_STATE + sum(PER_TENSOR + tensor.nbytes for tensor in state.values())
