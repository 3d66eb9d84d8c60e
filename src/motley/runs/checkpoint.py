"""Checkpoints: everything a run needs to go on, safe against being killed at any instant.

A checkpoint is a folder that is written under another name, flushed, and renamed into place, so it is complete or it is
not there. Tensors are safetensors and the rest is JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from motley.errors import MotleyError
from motley.federation import Server
from motley.splits.part import State

_SECTIONS = ("state", "averaged", "method")


def save_checkpoint(folder: Path, server: Server, keep: int) -> Path:
    """Write a server into `folder`/round-N and delete all but the newest `keep` checkpoints."""
    final = folder / f"round-{server.round_number:06d}"
    unfinished = folder / f"unfinished-{server.round_number:06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for section in _SECTIONS:
        tensors: State | None = getattr(server, section)
        if tensors is not None:
            save_file(
                {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, unfinished / f"{section}.safetensors"
            )
    numbers = {"round": server.round_number, "remembered": {str(c): r for c, r in server.remembered.items()}}
    (unfinished / "server.json").write_text(json.dumps(numbers))
    for path in (*unfinished.iterdir(), unfinished):
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Return a folder's complete checkpoints, oldest first."""
    return sorted(folder.glob("round-*"))


def load_checkpoint(folder: Path) -> Server | None:
    """Return the server of the newest checkpoint, or None where there is none yet."""
    found = checkpoints(folder)
    if not found:
        return None
    try:
        return _load(found[-1])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MotleyError(
            f"{found[-1]} cannot be read: {error}. Remove that folder to go on from the checkpoint before it."
        ) from None


def _load(path: Path) -> Server:
    numbers = json.loads((path / "server.json").read_text())
    sections = {
        section: load_file(file) if (file := path / f"{section}.safetensors").exists() else None
        for section in _SECTIONS
    }
    remembered = {int(client): int(made) for client, made in numbers["remembered"].items()}
    return Server(
        int(numbers["round"]), sections["state"] or {}, sections["averaged"], sections["method"] or {}, remembered
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a state: names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
