"""Checkpoints: everything a run needs to continue, safe against being killed at any instant.

A checkpoint is a folder that is written under another name, flushed to disk, and renamed into
place, so it is either complete or absent. Tensors are stored as safetensors and everything else as
JSON: nothing is ever unpickled. Numbers per client are stored as tensors, too: JSON of a million
clients takes seconds.

Disks, copies and people damage files, too. server.json holds a checksum (sha256) of every file of
tensors and one of itself, and they are verified when a checkpoint is read. It also describes the
run at that moment: the configuration, and checksums of the data and of the logs
(`runs/integrity.py`). Checkpoints of earlier versions have no checksums and can still be read; for
them, it is checked that all values are finite.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from motley.config import Config
from motley.core.client_numbers import ClientNumbers, client_numbers
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.files import flush
from motley.privacy import PrivacyLedger
from motley.server.state import STAGE_PREFIX, ServerState

#: The files with one number per client. Earlier versions have these numbers in server.json.
_ROUNDS, _UPLOADS = "client_state_rounds", "ledger_uploads"
#: Names of files and keys in checkpoints of earlier versions -> names now.
_RENAMED = {
    "averaged": "ema",
    "method": "method_state",
    "optimizer": f"{STAGE_PREFIX}optimizer",
    "remembered": "client_state_rounds",
    "spent": "ledger",
}
#: A longer list of clients' sizes (federation.sizes) is not saved with every checkpoint. Whether it
#: has changed is known from the checksum of the sizes (`integrity.data_checksums`).
MAX_SIZES = 1_000
#: Prefix of a folder's name while it is being written or deleted.
_UNFINISHED = "unfinished-"
#: Prefix of the names of damaged checkpoints that a resumed run has put aside.
_DAMAGED = "damaged-"


class DamagedCheckpointError(MotleyError):
    """A checkpoint that cannot be used."""

    def __init__(self, checkpoint: Path, file: Path, reason: object) -> None:
        self.file = file
        self.reason = str(reason).strip().rstrip(".")
        saved = checkpoints(checkpoint.parent)
        older = [path for path in saved if int(_number(path)) < int(_number(checkpoint))]
        if older:
            advice = f"`motley resume` continues from the one before it, {older[-1].name}."
        else:
            advice = f"To start again from round 1, remove {checkpoint} and resume the run."
        super().__init__(f"{file} cannot be read: {self.reason}. {advice}")


class Metadata(NamedTuple):
    """The content of server.json."""

    round_number: int
    sections: list[str]
    #: Of checkpoints of earlier versions; otherwise empty, and in a section.
    client_state_rounds: Mapping[int, int]
    #: Without its uploads, if they are in a section.
    ledger: PrivacyLedger
    #: The run's configuration; None in checkpoints of early versions.
    config: dict[str, Any] | None
    #: Section -> sha256 of its file; None in checkpoints of earlier versions.
    sha256: dict[str, str] | None
    #: Checksums of the run's data and logs at that time (`integrity.RunFacts`).
    facts: dict[str, Any]
    #: Section -> the names of its tensors in their order; empty in checkpoints of earlier versions.
    names: dict[str, list[str]]


def save_checkpoint(
    folder: Path,
    server: ServerState,
    keep: int,
    config: Config | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `server` to `folder`/round-N and delete all but the newest `keep` checkpoints.

    The configuration and `facts` about the run are saved with it, so that a resumed run can tell
    whether its files were changed afterwards.
    """
    unfinished = folder / f"{_UNFINISHED}{server.round_number:06d}"
    try:
        remove_unfinished(folder)
        return _write(folder, unfinished, server, keep, config, facts or {})
    except (OSError, SafetensorError) as error:
        # On a full disk, free the space that the incomplete checkpoint takes.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise MotleyError(
            f"{folder}: the checkpoint of round {server.round_number} cannot be written: {error}. "
            "Earlier checkpoints are complete."
        ) from None


def _write(
    folder: Path,
    unfinished: Path,
    server: ServerState,
    keep: int,
    config: Config | None,
    facts: Mapping[str, Any],
) -> Path:
    final = folder / f"round-{server.round_number:06d}"
    unfinished.mkdir(parents=True)
    sections = _sections(server)
    checksums = {}
    for name, tensors in sections.items():
        file = unfinished / f"{name}.safetensors"
        save_file(_storable(tensors), file)
        checksums[name] = file_sha256(file)
    metadata: dict[str, Any] = {
        "round": server.round_number,
        "sections": list(sections),
        "section_sha256": checksums,
        # safetensors keeps no order, and a sum over tensors in another order has other last bits.
        "names": {name: list(tensors) for name, tensors in sections.items()},
        "ledger": {"rounds": server.ledger.rounds_to_json()},
        "config": _saved_config(config) if config is not None else None,
        "facts": dict(facts),
    }
    # As it will be read: JSON turns numbers that are keys into texts, which sort differently.
    metadata = json.loads(json.dumps(metadata))
    metadata["sha256"] = _own_sha256(metadata)
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


def _saved_config(config: Config) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    if len(config.federation.sizes) > MAX_SIZES:
        values["federation"]["sizes"] = []
    return values


def _sections(server: ServerState) -> dict[str, State]:
    """Return the tensors of a server state, one section per file. Empty ones are left out."""
    sections = server.sections
    for name, numbers in ((_ROUNDS, server.client_state_rounds), (_UPLOADS, server.ledger.uploads)):
        if numbers:
            sections[name] = _to_tensors(numbers)
    return sections


def _to_tensors(numbers: Mapping[int, int]) -> State:
    """Return numbers of clients as tensors."""
    arrays = client_numbers(numbers)
    return {
        "clients": torch.from_numpy(arrays.clients),
        "numbers": torch.from_numpy(arrays.numbers),
    }


def _from_tensors(tensors: State) -> ClientNumbers:
    if tensors.keys() != {"clients", "numbers"}:
        raise ValueError("it should hold clients and numbers")
    return ClientNumbers.from_arrays(tensors["clients"].numpy(), tensors["numbers"].numpy())


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


def remove_unfinished(folder: Path) -> None:
    """Delete incomplete checkpoints, which a killed process was writing or deleting."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)


def put_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither used nor counted, and return its path."""
    aside = checkpoint.with_name(_DAMAGED + checkpoint.name)
    try:
        if aside.is_dir():
            shutil.rmtree(aside)
        return checkpoint.rename(aside)
    except OSError as error:
        raise MotleyError(f"{checkpoint}: cannot be renamed: {error.strerror}.") from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first. All are complete unless damaged later."""
    if folder.exists() and not folder.is_dir():
        raise MotleyError(
            f"{folder}: is a file; it should be the folder of the run's checkpoints. "
            "To start again from round 1, remove it and resume the run."
        )
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


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata from server.json, verified by its own checksum."""
    file = checkpoint / "server.json"
    try:
        values = json.loads(file.read_text())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        # Checkpoints of earlier versions have neither of the two.
        if "section_sha256" in values and "sha256" not in values:
            raise ValueError("its checksum is missing; the file was changed after it was written")
        if "sha256" in values and values.pop("sha256") != _own_sha256(values):
            raise ValueError("its checksum is wrong; the file was changed after it was written")
        metadata = _parse_metadata(values)
    except RecursionError:
        raise DamagedCheckpointError(checkpoint, file, "its values are nested too deeply") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise DamagedCheckpointError(checkpoint, file, _reason(reason)) from None
    if metadata.round_number != int(_number(checkpoint)):
        reason = f"it is about round {metadata.round_number}"
        raise DamagedCheckpointError(checkpoint, file, reason)
    return metadata


def _parse_metadata(values: dict[str, Any]) -> Metadata:
    renamed = {_RENAMED.get(key, key): value for key, value in values.items()}
    client_state_rounds = {}
    for client, state_round in renamed.get("client_state_rounds", {}).items():
        client_state_rounds[int(client)] = int(state_round)
    config, facts = renamed.get("config"), renamed.get("facts", {})
    if not isinstance(config, dict | None) or not isinstance(facts, dict):
        raise ValueError("config and facts should be tables")
    names = {section: list(names) for section, names in renamed.get("names", {}).items()}
    return Metadata(
        round_number=int(renamed["round"]),
        sections=list(renamed["sections"]),
        client_state_rounds=ClientNumbers(client_state_rounds),
        ledger=PrivacyLedger.from_json(renamed.get("ledger", {})),
        config=config,
        sha256=renamed.get("section_sha256"),
        facts=facts,
        names=names,
    )


def read_checkpoint(checkpoint: Path) -> ServerState:
    """Return the server that one checkpoint holds. A damaged one raises DamagedCheckpointError."""
    metadata = read_metadata(checkpoint)
    sections: dict[str, State] = {}
    of_clients: dict[str, ClientNumbers] = {}
    for name in metadata.sections:
        file = checkpoint / f"{name}.safetensors"
        try:
            if file.parent != checkpoint:
                raise ValueError("it is outside of the checkpoint")
            if metadata.sha256 is not None and metadata.sha256.get(name) != file_sha256(file):
                raise ValueError("its checksum is wrong; the file was changed after it was written")
            tensors = load_file(file)
            if metadata.sha256 is None:
                _require_finite(tensors)
            if name in metadata.names:
                tensors = _in_order(tensors, metadata.names[name])
            if name in (_ROUNDS, _UPLOADS):
                of_clients[name] = _from_tensors(tensors)
        except (OSError, ValueError, SafetensorError) as error:
            raise DamagedCheckpointError(checkpoint, file, _reason(error)) from None
        sections[_RENAMED.get(name, name)] = tensors
    if "state" not in sections:
        file = checkpoint / "server.json"
        raise DamagedCheckpointError(checkpoint, file, "it does not name the global state")
    ledger = metadata.ledger
    if _UPLOADS in of_clients:
        ledger = replace(ledger, uploads=of_clients[_UPLOADS])
    stage_states = {}
    for name, state in sections.items():
        if name.startswith(STAGE_PREFIX):
            stage_states[name.removeprefix(STAGE_PREFIX)] = state
    return ServerState(
        round_number=metadata.round_number,
        state=sections["state"],
        ema=sections.get("ema"),
        method_state=sections.get("method_state", {}),
        client_state_rounds=of_clients.get(_ROUNDS, metadata.client_state_rounds),
        stage_states=stage_states,
        ledger=ledger,
    )


def _in_order(tensors: State, names: Sequence[str]) -> State:
    """Return tensors in the order that they had when they were saved."""
    if sorted(names) != sorted(tensors):
        raise ValueError("its tensors are not those that server.json names")
    return {name: tensors[name] for name in names}


def _reason(error: object) -> object:
    """Return the reason of an error, without the path that the message names anyway."""
    return getattr(error, "strerror", None) or error


def _require_finite(tensors: State) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name!r} has values that are not finite")


def _own_sha256(metadata: Mapping[str, Any]) -> str:
    """Return the checksum of server.json's values.

    It is over their canonical text, which does not depend on the order of keys.
    """
    text = json.dumps(metadata, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """Return the checksum of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of a state's names, dtypes, shapes and every bit of its values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
