"""What clients remember between rounds: control variates, previous models, dual variables.

A memory is filed under its client and the round that made it. Which round counts is the server's word
(`Job.remembers`), so a round that was never completed leaves no trace: after a crash the server names the older memory,
and the newer one is ignored or replaced.

The latest memories stay on the GPU they were made on, up to a limit, so that no turn waits for a trip to the host and
back; older ones in host memory, up to another; and the others lie in one SQLite file, each as large as its client's own
part. All that is filed between two checkpoints is one transaction: `save` ends it, and a crash takes it back. One file,
because a thousand small ones take a second to reach the disk and this takes hundredths of one; SQLite, because it gives
the room of deleted memories to new ones, for which a log would have to be rewritten.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State, by_type

HELD = 2**30
"""Bytes of host memory for memories, where nothing else is said."""
PIECE = 2**26
"""Bytes of a memory in one row: SQLite's rows end at 10^9."""


class MemoryStore:
    """Memories by client and round: the latest on the device they come from, where `near` bytes are given for that, and
    in host memory (`most` bytes); the others in a folder, or else in a temporary file.
    """

    def __init__(
        self, folder: Path | None = None, most: int = HELD, near: int = 0, device: torch.device | None = None
    ) -> None:
        self.path = folder / "memories.sqlite" if folder else None
        self.most, self.near, self.device = most, near, device
        self.held_bytes = self.near_bytes = 0
        self._near: dict[tuple[int, int], State] = {}
        """Client and round -> memory on the device, oldest first."""
        self._held: dict[tuple[int, int], State] = {}
        """The same in host memory."""
        self._unsaved: set[tuple[int, int]] = set()
        """Which of them are not in the file."""
        self._spilled: set[tuple[int, int]] = set()
        """Which are there for want of room, and in no checkpoint yet."""
        self._rounds: dict[int, list[int]] = {}
        """Client -> the rounds of its memories that may be on the device or in host memory."""
        self._named: dict[int, tuple[int | None, int]] = {}
        """Client -> the last two memories that the server named; the first is None where it named one only."""
        self._file: MemoryFile | None = None
        self._forgotten: Mapping[int, int] = {}

    def put(self, client: int, round_number: int, memory: Mapping[str, Tensor]) -> None:
        """Keep a copy of a client's memory of a round; the oldest make room for it."""
        if not memory:
            return
        key = client, round_number
        self._drop([key])
        self._unsaved.add(key)
        rounds = self._rounds.setdefault(client, [])
        if round_number not in rounds:
            rounds.append(round_number)
        if not self.near or any(tensor.device != self.device for tensor in memory.values()):
            self._hold(key, memory)
            return
        self._near[key] = _copied(memory)
        self.near_bytes += _bytes(memory)
        while self.near_bytes > self.near:
            oldest = next(iter(self._near))
            memory = self._near.pop(oldest)
            self.near_bytes -= _bytes(memory)
            self._hold(oldest, memory)

    def _hold(self, key: tuple[int, int], memory: Mapping[str, Tensor]) -> None:
        self._held[key] = _on_host(memory)
        self.held_bytes += _bytes(memory)
        while self.held_bytes > self.most:
            oldest = next(iter(self._held))
            if oldest in self._unsaved:
                self._write(oldest)
                self._spilled.add(oldest)
            self.held_bytes -= _bytes(self._held.pop(oldest))

    def recall(self, client: int, round_number: int) -> State:
        """Return the memory that a client's turn begins with, and drop those that no server will name again.

        The one that the server named before stays: if the round that made this one is lost, it names that one again.
        """
        before, now = self._named.get(client, (None, None))
        if now != round_number:
            before = now
            self._named[client] = before, round_number
        kept = [number for number in self._rounds.get(client, []) if number >= round_number or number == before]
        self._drop((client, number) for number in self._rounds.get(client, []) if number not in kept)
        self._rounds[client] = kept
        return self.get(client, round_number)

    def get(self, client: int, round_number: int) -> State:
        """Return a client's memory of a round."""
        key = client, round_number
        if key in self._near:
            for tensor in self._near[key].values():
                if tensor.is_cuda:  # it may have to go while this stream still reads it
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return self._near[key]
        if key in self._held:
            return self._held[key]
        file = self._open(make=False)
        found = file.read(client, round_number) if file else None
        if found is None:
            raise MotleyError(f"the memory of client {client} after round {round_number} is missing ({self.path}).")
        return found

    def save(self, rounds: Mapping[int, int]) -> None:
        """Make the named memories (client -> round) durable; drop all that is older and not in the file.

        What an earlier process filed under the same name is replaced: the round it came from was never completed.
        """
        self._drop_older(rounds)
        if self.path is None:
            return
        for client, made in sorted(self._unsaved):
            if rounds.get(client) == made:
                self._write((client, made))
        self._spilled.clear()
        if self._file:
            self._file.commit()

    def forget_older(self, rounds: Mapping[int, int]) -> None:
        """Delete memories of rounds before the named ones, once no checkpoint that is kept names those."""
        self._drop_older(rounds)
        file = self._open(make=False)
        if file:
            file.delete_older((c, made) for c, made in rounds.items() if self._forgotten.get(c) != made)
            file.commit()
            self._forgotten = rounds

    def _drop_older(self, rounds: Mapping[int, int]) -> None:
        self._drop([(client, made) for client, made in (*self._near, *self._held) if made < rounds.get(client, 0)])

    def _drop(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            self._unsaved.discard(key)
            self.near_bytes -= _bytes(self._near.pop(key, {}))
            self.held_bytes -= _bytes(self._held.pop(key, {}))
            if key in self._spilled and self._file:
                self._file.delete(*key)
                self._spilled.discard(key)

    def _write(self, key: tuple[int, int]) -> None:
        file = self._open(make=True)
        assert file is not None
        file.write(*key, self._held[key] if key in self._held else _on_host(self._near[key]))
        self._unsaved.discard(key)

    def _open(self, *, make: bool) -> MemoryFile | None:
        """Return the file, or None where there is none yet and none is to be made."""
        if self._file is None and (make or (self.path is not None and self.path.exists())):
            self._file = MemoryFile(self.path)
        return self._file


class MemoryFile:
    """Memories in an SQLite file, or in a temporary one that ends with the process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lost = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("opened"):
            self._database = sqlite3.connect(path or "", isolation_level=None)
            weakref.finalize(self, self._database.close)
            self._database.execute("PRAGMA page_size = 16384")
            self._database.execute("PRAGMA secure_delete = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS memories "
                "(client INTEGER, round INTEGER, piece INTEGER, content BLOB, PRIMARY KEY (client, round, piece))"
            )

    def write(self, client: int, round_number: int, memory: State) -> None:
        """File a memory, in place of one of the same client and round."""
        content = memoryview(save(memory))
        pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
        with self._changing():
            self._database.execute("DELETE FROM memories WHERE client = ? AND round = ?", (client, round_number))
            self._database.executemany(
                "INSERT INTO memories VALUES (?, ?, ?, ?)",
                [(client, round_number, number, piece) for number, piece in enumerate(pieces)],
            )

    def read(self, client: int, round_number: int) -> State | None:
        """Return a memory, or None where there is none. Safetensors knows no order of names: they are sorted."""
        query = "SELECT content FROM memories WHERE client = ? AND round = ? ORDER BY piece"
        with self._explained("read"):
            pieces = [piece for (piece,) in self._database.execute(query, (client, round_number))]
            return dict(sorted(load(b"".join(pieces)).items())) if pieces else None

    def delete(self, client: int, round_number: int) -> None:
        """Delete a memory."""
        with self._changing():
            self._database.execute("DELETE FROM memories WHERE client = ? AND round = ?", (client, round_number))

    def delete_older(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Delete clients' memories of rounds before the given ones."""
        with self._changing():
            self._database.executemany("DELETE FROM memories WHERE client = ? AND round < ?", rounds)

    def commit(self) -> None:
        """Make what was filed and deleted durable."""
        if self._lost:
            raise MotleyError(f"{self.path}: what clients remembered since the last checkpoint is lost.")
        if self._database.in_transaction:
            with self._explained("written"):
                self._database.execute("COMMIT")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the file within the transaction that `commit` ends; an interruption leaves it open."""
        with self._explained("written"):
            if not self._database.in_transaction:
                self._database.execute("BEGIN")
            yield

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Say which file failed, and notice if SQLite took back the whole transaction: on a full disk it may."""
        try:
            yield
        except (sqlite3.Error, SafetensorError) as error:
            self._lost |= what == "written" and not self._database.in_transaction
            raise MotleyError(f"{self.path or 'the temporary file of memories'} cannot be {what}: {error}.") from None


def _on_host(memory: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in sorted(memory.items())
    }


def _copied(memory: Mapping[str, Tensor]) -> State:
    """Return copies on the same device, made in one grouped call a type."""
    copies = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in sorted(memory.items())}
    with torch.no_grad():
        for into, values in zip(by_type(copies.values()), by_type(memory[name] for name in copies), strict=True):
            if into:
                torch._foreach_copy_(into, values)
    return copies


def _bytes(memory: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in memory.values())
