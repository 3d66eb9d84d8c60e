"""What clients remember between rounds: control variates, previous models, dual variables.

A memory is filed under its client and the round that made it. Which round counts is the server's word
(`Job.remembers`), so a round that was never completed leaves no trace: after a crash the server names the older memory,
and the newer one is ignored. Memories stay in host memory and reach the disk when a checkpoint is made, changed clients
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from motley.errors import MotleyError
from motley.files import write_atomically
from motley.splits.part import State


class MemoryStore:
    """Memories by client and round, in a folder if one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[tuple[int, int], State] = {}
        self._unsaved: set[tuple[int, int]] = set()
        self._oldest: dict[int, int] = {}
        """Client -> the round before which its files are deleted."""

    def put(self, client: int, round_number: int, memory: Mapping[str, Tensor]) -> None:
        """Keep a client's memory of a round, copied to the host."""
        if memory:
            self._held[client, round_number] = {
                name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for name, tensor in memory.items()
            }
            self._unsaved.add((client, round_number))

    def get(self, client: int, round_number: int) -> State:
        """Return a client's memory of a round."""
        held = self._held.get((client, round_number))
        if held is not None:
            return held
        path = self._path(client, round_number)
        if path is None or not path.exists():
            raise MotleyError(f"the memory of client {client} after round {round_number} is missing ({path}).")
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise MotleyError(f"{path} cannot be read: {error}.") from None

    def save(self, rounds: Mapping[int, int]) -> None:
        """Write the named memories (client -> round) that are new here; drop from memory all that is older.

        A file that an earlier process left under the same name is replaced: the round it came from was never completed.
        """
        self._held = {
            (client, made): memory
            for (client, made), memory in self._held.items()
            if client not in rounds or made >= rounds[client]
        }
        self._unsaved &= self._held.keys()
        for client, made in sorted(self._unsaved):
            path = self._path(client, made)
            if path is not None and rounds.get(client) == made:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, save(self._held[client, made]))
                self._unsaved.discard((client, made))

    def forget_older(self, rounds: Mapping[int, int]) -> None:
        """Delete files of rounds before the named ones, once no checkpoint that is kept names those."""
        if self.folder is None or not self.folder.exists():
            return
        for client, made in rounds.items():
            if self._oldest.get(client) != made:
                for file in (self.folder / str(client)).glob("*.safetensors"):
                    if int(file.stem) < made:
                        file.unlink()
                self._oldest[client] = made

    def _path(self, client: int, round_number: int) -> Path | None:
        return self.folder / str(client) / f"{round_number}.safetensors" if self.folder else None
