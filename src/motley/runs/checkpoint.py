"""Checkpoints: everything a run needs to continue, safe against being killed at any instant.

A checkpoint is a folder that is written under another name, flushed, and renamed into place, so it is complete or it is
not there. Tensors are safetensors and the rest is JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.files import flush
from motley.privacy import Spent
from motley.server.state import ServerState
from motley.settings import flat

#: Prefix of the files that hold the states of the pipeline's stages.
_STAGE = "stage-"
#: Names of sections in checkpoints of earlier versions -> names now.
_OLD_SECTIONS = {"averaged": "ema", "method": "method_state", "optimizer": f"{_STAGE}optimizer"}
#: Prefix of a folder's name while it is being written or deleted.
_UNFINISHED = "unfinished-"


def save_checkpoint(folder: Path, server: ServerState, keep: int, config: Config | None = None) -> Path:
    """Write a server into `folder`/round-N and delete all but the newest `keep` checkpoints.

    The configuration is kept with it, so that `changed_settings` can tell when config.toml was edited afterwards.
    """
    unfinished = folder / f"{_UNFINISHED}{server.round_number:06d}"
    try:
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        return _write(folder, unfinished, server, keep, config)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk, it would be in the way of everything else
        raise MotleyError(
            f"{folder}: the checkpoint of round {server.round_number} cannot be written: {error}. "
            "Earlier checkpoints are complete."
        ) from None


def _write(folder: Path, unfinished: Path, server: ServerState, keep: int, config: Config | None) -> Path:
    final = folder / f"round-{server.round_number:06d}"
    unfinished.mkdir(parents=True)
    sections = _sections(server)
    for name, tensors in sections.items():
        save_file(_storable(tensors), unfinished / f"{name}.safetensors")
    numbers = {
        "round": server.round_number,
        "sections": list(sections),
        "client_state_rounds": server.client_state_rounds,
        "ledger": server.ledger.to_json(),
        "config": config.model_dump(mode="json") if config is not None else None,
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


def _sections(server: ServerState) -> dict[str, State]:
    """Return the tensors of a server state by the name of their file; empty sections are left out."""
    sections = {"state": server.state, "ema": server.ema or {}, "method_state": server.method_state}
    for name, state in server.stage_states.items():
        sections[_STAGE + name] = state
    return {name: tensors for name, tensors in sections.items() if tensors}


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


def load_checkpoint(folder: Path) -> ServerState | None:
    """Return the server of the newest checkpoint, or None where there is none yet."""
    found = checkpoints(folder)
    return read_checkpoint(found[-1]) if found else None


def last_round(folder: Path) -> int:
    """Return the round of the newest checkpoint, 0 if there is none."""
    found = checkpoints(folder)
    return int(found[-1].name.removeprefix("round-")) if found else 0


def changed_settings(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of the newest checkpoint: name -> (value then, value now).

    Older versions of Motley did not keep the configuration with a checkpoint; nothing has changed then.
    """
    found = checkpoints(folder)
    if not found:
        return {}
    try:
        numbers = json.loads((found[-1] / "server.json").read_text())
    except (OSError, ValueError):
        return {}  # read_checkpoint reports this
    saved = numbers.get("config") if isinstance(numbers, dict) else None
    if not isinstance(saved, dict):
        return {}
    before, now = flat(saved), flat(config.model_dump(mode="json"))
    names = sorted({*before, *now})
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def read_checkpoint(checkpoint: Path) -> ServerState:
    """Return the server of one checkpoint."""
    file = checkpoint / "server.json"
    try:
        numbers = _with_new_keys(json.loads(file.read_text()))
        client_state_rounds = {
            int(client): int(round_number) for client, round_number in numbers["client_state_rounds"].items()
        }
        sections: dict[str, State] = {}
        for name in list(numbers["sections"]):
            file = checkpoint / f"{name}.safetensors"
            sections[_OLD_SECTIONS.get(name, name)] = load_file(file)
        stages = [name for name in sections if name.startswith(_STAGE)]
        return ServerState(
            round_number=int(numbers["round"]),
            state=sections["state"],
            ema=sections.get("ema"),
            method_state=sections.get("method_state", {}),
            client_state_rounds=client_state_rounds,
            stage_states={name.removeprefix(_STAGE): sections[name] for name in stages},
            ledger=Spent.from_json(numbers.get("ledger", {})),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise MotleyError(
            f"{file} cannot be read: {error}. Remove {checkpoint} to go on from the checkpoint before it."
        ) from None


def _with_new_keys(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's numbers under today's keys; earlier versions wrote some of them under others."""
    renamed = {"remembered": "client_state_rounds", "spent": "ledger"}
    return {renamed.get(key, key): value for key, value in numbers.items()}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a state: names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
