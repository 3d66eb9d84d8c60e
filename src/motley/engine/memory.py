"""What clients remember between rounds: control variates, previous models, dual variables.

A memory is filed under its client and the round that made it. Which round counts is the server's word
(`Job.remembers`), so a round that was never completed leaves no trace: after a crash the server names the older memory,
and the newer one is ignored. Memories stay in host memory and reach the disk when a checkpoint is made, changed clients
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from motley.errors import MotleyError
from motley.splits.part import State


class MemoryStore:
    """Memories by client and round, in a folder if one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[tuple[int, int], State] = {}

    def put(self, client: int, round_number: int, memory: Mapping[str, Tensor]) -> None:
        """Keep a client's memory of a round, copied to the host."""
        if memory:
            self._held[client, round_number] = {n: t.detach().to("cpu", copy=True) for n, t in memory.items()}

    def get(self, client: int, round_number: int) -> State:
        """Return a client's memory of a round."""
        held = self._held.get((client, round_number))
        if held is not None:
            return held
        path = self._path(client, round_number)
        if path is None or not path.exists():
            raise MotleyError(f"the memory of client {client} after round {round_number} is missing ({path}).")
        return load_file(path)

    def save(self, rounds: Mapping[int, int]) -> None:
        """Write the named memories (client -> round) that are not on disk yet; drop from memory all that is older."""
        self._held = {
            (client, made): memory
            for (client, made), memory in self._held.items()
            if client not in rounds or made >= rounds[client]
        }
        if self.folder is None:
            return
        for client, made in rounds.items():
            path = self._path(client, made)
            if path is not None and (client, made) in self._held and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".unfinished")
                save_file(self._held[client, made], unfinished)
                unfinished.rename(path)

    def forget_older(self, rounds: Mapping[int, int]) -> None:
        """Delete files of rounds before the named ones, once a checkpoint that names these is safe."""
        for client, made in rounds.items():
            path = self._path(client, made)
            if path is None or not path.parent.exists():
                continue
            for other in path.parent.glob("*.safetensors"):
                if int(other.stem) < made:
                    other.unlink()

    def _path(self, client: int, round_number: int) -> Path | None:
        return self.folder / str(client) / f"{round_number}.safetensors" if self.folder else None
