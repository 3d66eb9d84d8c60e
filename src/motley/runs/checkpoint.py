"""Checkpoints: everything a run needs to go on, safe against being killed at any instant.

A checkpoint is a folder that is written under another name, flushed, and renamed into place, so it is complete or it is
not there. Tensors are safetensors and the rest is JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from motley.errors import MotleyError
from motley.files import flush
from motley.privacy import Spent
from motley.round import Server
from motley.splits.part import State

_SECTIONS = ("state", "averaged", "method", "optimizer")
"""What of a server is tensors; what is empty is not written."""
_UNFINISHED = "unfinished-"
"""What the name of a folder begins with while it is written or deleted."""


def save_checkpoint(folder: Path, server: Server, keep: int) -> Path:
    """Write a server into `folder`/round-N and delete all but the newest `keep` checkpoints."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    final = folder / f"round-{server.round_number:06d}"
    unfinished = folder / f"{_UNFINISHED}{server.round_number:06d}"
    unfinished.mkdir(parents=True)
    sections = {name: tensors for name in _SECTIONS if (tensors := getattr(server, name))}
    for name, tensors in sections.items():
        save_file(_storable(tensors), unfinished / f"{name}.safetensors")
    numbers = {
        "round": server.round_number,
        "sections": list(sections),
        "remembered": server.remembered,
        "spent": server.spent.to_json(),
    }
    (unfinished / "server.json").write_text(json.dumps(numbers))
    for path in (*unfinished.iterdir(), unfinished):
        flush(path)
    if final.exists():
        _delete(final)
    unfinished.rename(final)
    flush(folder)
    for old in checkpoints(folder)[:-keep]:
        _delete(old)
    return final


def _storable(tensors: State) -> State:
    """Return tensors as safetensors wants them: in the host's memory, dense, and no two in the same place."""
    return {n: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for n, t in tensors.items()}


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted no longer has a checkpoint's name."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(_UNFINISHED + checkpoint.name)))


def checkpoints(folder: Path) -> list[Path]:
    """Return a folder's complete checkpoints, oldest first."""
    numbers = {path: path.name.removeprefix("round-") for path in folder.glob("round-*")}
    return sorted((path for path, number in numbers.items() if number.isdecimal()), key=lambda path: int(numbers[path]))


def load_checkpoint(folder: Path) -> Server | None:
    """Return the server of the newest checkpoint, or None where there is none yet."""
    found = checkpoints(folder)
    return read_checkpoint(found[-1]) if found else None


def read_checkpoint(checkpoint: Path) -> Server:
    """Return the server of one checkpoint."""
    file = checkpoint / "server.json"
    try:
        numbers = json.loads(file.read_text())
        remembered = {int(client): int(made) for client, made in numbers["remembered"].items()}
        round_number, names = int(numbers["round"]), list(numbers["sections"])
        sections: dict[str, State] = {}
        for name in names:
            file = checkpoint / f"{name}.safetensors"
            sections[name] = load_file(file)
        state, averaged = sections["state"], sections.get("averaged")
        method, optimizer = sections.get("method", {}), sections.get("optimizer", {})
        spent = Spent.from_json(numbers.get("spent", {}))
        return Server(round_number, state, averaged, method, remembered, optimizer, spent)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise MotleyError(
            f"{file} cannot be read: {error}. Remove {checkpoint} to go on from the checkpoint before it."
        ) from None


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a state: names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
