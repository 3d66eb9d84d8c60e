"""Checkpoints: everything a run needs to continue, safe against being killed at any instant.

A checkpoint is a folder that is written under another name, flushed to disk, and renamed into
place, so it is either complete or absent. Tensors are stored as safetensors and everything else as
JSON: nothing is ever unpickled.
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

from motley.config import Config, from_saved
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.files import flush
from motley.privacy import PrivacyLedger
from motley.server.state import ServerState
from motley.settings import flat

#: Prefix of the files that hold the states of the pipeline's stages.
_STAGE = "stage-"
#: Names of files and keys in checkpoints of earlier versions -> names now.
_RENAMED = {
    "averaged": "ema",
    "method": "method_state",
    "optimizer": f"{_STAGE}optimizer",
    "remembered": "client_state_rounds",
    "spent": "ledger",
}
#: Prefix of a folder's name while it is being written or deleted.
_UNFINISHED = "unfinished-"


def save_checkpoint(
    folder: Path, server: ServerState, keep: int, config: Config | None = None
) -> Path:
    """Write `server` to `folder`/round-N and delete all but the newest `keep` checkpoints.

    The configuration is saved with it, so that `changed_settings` can tell whether config.toml was
    edited afterwards.
    """
    unfinished = folder / f"{_UNFINISHED}{server.round_number:06d}"
    try:
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        return _write(folder, unfinished, server, keep, config)
    except (OSError, SafetensorError) as error:
        # On a full disk, free the space that the incomplete checkpoint takes.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise MotleyError(
            f"{folder}: the checkpoint of round {server.round_number} cannot be written: {error}. "
            "Earlier checkpoints are complete."
        ) from None


def _write(
    folder: Path, unfinished: Path, server: ServerState, keep: int, config: Config | None
) -> Path:
    final = folder / f"round-{server.round_number:06d}"
    unfinished.mkdir(parents=True)
    sections = _sections(server)
    for name, tensors in sections.items():
        save_file(_storable(tensors), unfinished / f"{name}.safetensors")
    metadata = {
        "round": server.round_number,
        "sections": list(sections),
        "client_state_rounds": server.client_state_rounds,
        "ledger": server.ledger.to_json(),
        "config": config.model_dump(mode="json") if config is not None else None,
    }
    (unfinished / "server.json").write_text(json.dumps(metadata))
    # Files and names must be on disk before the rename and the rename before older checkpoints are
    # deleted: after a power failure, the operating system may have done them in any order.
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
    """Return the tensors of a server state, one section per file. Empty ones are left out."""
    sections = {
        "state": server.state,
        "ema": server.ema or {},
        "method_state": server.method_state,
    }
    for name, state in server.stage_states.items():
        sections[_STAGE + name] = state
    return {name: tensors for name, tensors in sections.items() if tensors}


def _storable(tensors: State) -> State:
    """Copy tensors into the form that safetensors requires: on the CPU, contiguous, not shared."""
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill leaves no incomplete checkpoint."""
    renamed = checkpoint.rename(checkpoint.with_name(_UNFINISHED + checkpoint.name))
    shutil.rmtree(renamed)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    paths = [path for path in folder.glob("round-*") if _number(path).isdecimal()]
    return sorted(paths, key=lambda path: int(_number(path)))


def _number(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("round-")


def load_checkpoint(folder: Path) -> ServerState | None:
    """Return the server of the newest checkpoint, or None if there is none yet."""
    saved = checkpoints(folder)
    return read_checkpoint(saved[-1]) if saved else None


def last_round(folder: Path) -> int:
    """Return the round of the newest checkpoint, 0 if there is none."""
    saved = checkpoints(folder)
    return int(_number(saved[-1])) if saved else 0


def changed_settings(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those saved with the newest checkpoint.

    The result maps a setting's name to (saved value, current value). Checkpoints of older versions
    of Motley hold no configuration; for those, the result is empty.
    """
    saved = checkpoints(folder)
    if not saved:
        return {}
    try:
        metadata = json.loads((saved[-1] / "server.json").read_text())
    except (OSError, ValueError):
        return {}  # `read_checkpoint` reports the damage
    saved_config = metadata.get("config") if isinstance(metadata, dict) else None
    if not isinstance(saved_config, dict):
        return {}
    # Settings that were renamed or added since then have not changed.
    before = flat(from_saved(saved_config).model_dump(mode="json"))
    now = flat(config.model_dump(mode="json"))
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            changes[name] = (before.get(name), now.get(name))
    return changes


def read_checkpoint(checkpoint: Path) -> ServerState:
    """Return the server that one checkpoint holds."""
    file = checkpoint / "server.json"  # the file being read, for the message
    try:
        metadata = {}
        for key, value in json.loads(file.read_text()).items():
            metadata[_RENAMED.get(key, key)] = value
        client_state_rounds = {}
        for client, state_round in metadata["client_state_rounds"].items():
            client_state_rounds[int(client)] = int(state_round)
        sections: dict[str, State] = {}
        for name in list(metadata["sections"]):
            file = checkpoint / f"{name}.safetensors"
            sections[_RENAMED.get(name, name)] = load_file(file)
        stage_states = {}
        for name, state in sections.items():
            if name.startswith(_STAGE):
                stage_states[name.removeprefix(_STAGE)] = state
        return ServerState(
            round_number=int(metadata["round"]),
            state=sections["state"],
            ema=sections.get("ema"),
            method_state=sections.get("method_state", {}),
            client_state_rounds=client_state_rounds,
            stage_states=stage_states,
            ledger=PrivacyLedger.from_json(metadata.get("ledger", {})),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        advice = f"Remove {checkpoint} to continue from the checkpoint before it."
        raise MotleyError(f"{file} cannot be read: {error}. {advice}") from None


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a state's names, dtypes, shapes and every bit of its values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
