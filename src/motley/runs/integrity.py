"""Notice changes of a run's folder and data that the run did not make itself.

Every checkpoint holds the configuration, checksums of the data, and checksums of the logs up to its
round. Commands that read a run warn about differences (`find_problems`). A run is resumed only if
its rounds so far belong together with those to come (`runs/run.py`): settings that have no effect
on the training may change, others are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motley.config import Config, from_saved, read_toml
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.data import Examples
from motley.federation import Federation
from motley.runs.checkpoint import (
    MAX_SIZES,
    DamagedCheckpointError,
    Metadata,
    checkpoints,
    file_sha256,
    last_round,
    read_metadata,
)
from motley.runs.client_log import ClientLog
from motley.runs.folder import RunFolder
from motley.runs.line_log import LineLog
from motley.runs.metrics import MetricsLog
from motley.server.state import ServerState
from motley.settings import flat

#: Arrays of at most this many bytes are hashed whole, others at evenly spread places.
MAX_HASHED = 2**28
#: The number of those places.
PLACES = 2**12

#: Settings that may change when a run is resumed; a dot at the end stands for a whole table. They
#: do not affect the training, or only in the last bits (another device), or they name files whose
#: content is compared.
CHANGEABLE = (
    "training.rounds",
    "evaluation.",
    "run.",
    "engine.name",
    "engine.device",
    "engine.slots",
    "engine.workers",
    "engine.threads",
    "engine.overlap_rounds",
    "engine.client_state_gpu_fraction",
    "engine.client_state_host_gib",
    "engine.flower.",
    "data.root",
    "data.path",
    "data.partition.path",
    "public.path",
    "federation.budgets",
    "model.weights",
    "preset",
)
#: Settings in those tables that do affect the training.
FIXED = ("evaluation.client_test_fraction",)

#: The training examples in the words of messages.
TRAIN = "training examples"

#: Setting -> (value before, value now).
Changes = Mapping[str, tuple[Any, Any]]


def may_change(setting: str) -> bool:
    """Return whether a setting may change between the rounds of a run."""
    if setting in FIXED:
        return False
    for allowed in CHANGEABLE:
        if setting == allowed or (allowed.endswith(".") and setting.startswith(allowed)):
            return True
    return False


# ---- the data


def data_checksums(federation: Federation) -> dict[str, str]:
    """Return checksums of everything that a federation learns from, by the words of messages.

    Which examples each client has is only known if the clients are in this process.
    """
    dataset = federation.dataset
    checksums = {
        TRAIN: _examples(dataset.train),
        "test examples": _examples(dataset.test),
        "sizes of the clients": _arrays(np.frombuffer("\n".join(federation.sizes).encode(), "u1")),
    }
    with suppress(MotleyError):
        partition = federation.partition
        checksums["examples of each client"] = _arrays(partition.indices, partition.offsets)
    public = federation.method.info.public
    if public is not None:
        checksums["public images"] = _arrays(public.raw)
    return checksums


def _examples(examples: Examples) -> str:
    clients = [] if examples.clients is None else [examples.clients]
    return _arrays(examples.inputs, examples.targets, *clients)


def _arrays(*arrays: np.ndarray) -> str:
    """Return a checksum of arrays: their types, their shapes, and their values."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}|{array.shape}|".encode())
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for piece in _pieces(content):
            digest.update(piece.data)
    return digest.hexdigest()


def _pieces(content: np.ndarray) -> Iterable[np.ndarray]:
    """Return the bytes of an array to hash: all of them, or `MAX_HASHED` evenly spread ones."""
    if len(content) <= MAX_HASHED:
        return [content]
    length = MAX_HASHED // PLACES
    starts = np.linspace(0, len(content) - length, PLACES).astype(np.int64)
    return (content[start : start + length] for start in starts)


def changed_data(metadata: Metadata, checksums: Mapping[str, str]) -> str:
    """Return which data has changed since the checkpoint was written; empty if none has."""
    saved = metadata.facts.get("data")
    if not isinstance(saved, dict):
        return ""
    changed = [what for what, value in checksums.items() if saved.get(what, value) != value]
    return " and the ".join(changed)


def trained_on(folder: RunFolder, train: Examples) -> bool:
    """Return whether these are the training examples of a run's newest checkpoint, if known."""
    metadata = newest_metadata(folder)
    if metadata is None:
        return True
    return not changed_data(metadata, {TRAIN: _examples(train)})


# ---- facts for checkpoints


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run in a checkpoint, beside the server state and the configuration."""

    folder: RunFolder
    #: The logs that the run writes, by their files' names.
    logs: Sequence[LineLog]
    #: Checksums of the data (`data_checksums`).
    data: Mapping[str, str]

    def at(self, round_number: int) -> dict[str, Any]:
        """Return the facts of a round, after its lines were written."""
        logs = {log.path.name: log.digest(round_number).to_json() for log in self.logs}
        files = {}
        for file in _files(self.folder):
            with suppress(OSError):
                files[file.name] = file_sha256(file)
        return {"data": dict(self.data), "logs": logs, "files": files}

    def flush(self) -> None:
        """Wait until the logs are on disk: a checkpoint must not come before its rounds' lines."""
        for log in self.logs:
            log.flush()


def _files(folder: RunFolder) -> list[Path]:
    """Return the files that are written when the run starts and never changed."""
    return [folder.environment, folder.path / "plugins.json"]


def log_problem(folder: RunFolder, metadata: Metadata) -> str:
    """Return how a log differs from its content at a checkpoint; empty if it does not.

    Lines of later rounds are not compared.
    """
    rounds = metadata.round_number
    problem = _missing_rounds(folder, rounds)
    if problem:
        return problem
    saved = metadata.facts.get("logs")
    for log in (MetricsLog(folder.metrics), ClientLog(folder.client_scores)):
        expected = saved.get(log.path.name) if isinstance(saved, dict) else None
        if not isinstance(expected, dict):
            continue
        current = log.digest_of_first(expected.get("lines", 0))
        if current.to_json() == expected:
            continue
        if current.lines < expected["lines"]:
            count = expected["lines"] - current.lines
            return f"{log.path}: {count} of {expected['lines']} lines are missing."
        first = _last_intact(folder, log, rounds) + 1
        which = f"round {rounds}" if first == rounds else f"rounds {first} to {rounds}"
        return f"{log.path}: a line of {which} was changed after it was written."
    return ""


def _missing_rounds(folder: RunFolder, rounds: int) -> str:
    """Return which rounds up to a checkpoint's have no line in metrics.jsonl."""
    present = {line["round"] for line in MetricsLog(folder.metrics).read()}
    missing = [number for number in range(1, rounds + 1) if number not in present]
    if not missing:
        return ""
    if len(missing) == 1:
        return f"{folder.metrics}: the line of round {missing[0]} is missing."
    named = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return f"{folder.metrics}: the lines of {len(missing)} rounds are missing: {named}."


def _last_intact(folder: RunFolder, log: LineLog, before: int) -> int:
    """Return the last checkpoint before a round up to which the log is unchanged; 0: none."""
    intact = 0
    for checkpoint in checkpoints(folder.checkpoints):
        with suppress(DamagedCheckpointError, KeyError, TypeError):
            metadata = read_metadata(checkpoint)
            expected = metadata.facts["logs"][log.path.name]
            same = log.digest_of_first(expected["lines"]).to_json() == expected
            if same and metadata.round_number < before:
                intact = metadata.round_number
    return intact


# ---- settings


def changed_settings(folder: RunFolder, metadata: Metadata, config: Config) -> Changes:
    """Return the settings that differ from those saved with a checkpoint, and were not recorded.

    Checkpoints of older versions of Motley hold no configuration; for those, the result is empty.
    """
    if metadata.config is None:
        return {}
    # Settings that were renamed or added since then have not changed.
    before = flat(from_saved(metadata.config).model_dump(mode="json"))
    for change in recorded_changes(folder):
        if change.get("round", 0) >= metadata.round_number and "setting" in change:
            before[change["setting"]] = change.get("new")
    return _saved_difference(before, flat(config.model_dump(mode="json")))


def _saved_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the differences, except in a list of clients' sizes that was too long to be saved.

    The checksum of the sizes tells whether that has changed.
    """
    sizes = now.get("federation.sizes") or []
    if len(sizes) > MAX_SIZES:
        before = {**before, "federation.sizes": sizes}
    return difference(before, now)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the settings in which two flat configurations differ."""
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            changes[name] = (before.get(name), now.get(name))
    return changes


def recorded_changes(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the changes that resumed runs have recorded. Lines that cannot be read are skipped."""
    changes = []
    for line in LineLog(folder.changes).read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            change = json.loads(line)
            if isinstance(change, dict) and isinstance(change.get("round"), int):
                changes.append(change)
    return changes


def record_change(folder: RunFolder, round_number: int, **change: Any) -> None:
    """Record that something about the run was changed after a round."""
    log = LineLog(folder.changes)
    log.append_text(round_number, json.dumps({"round": round_number, **change}))
    log.flush()


def refuse_changes(folder: RunFolder, round_number: int, changes: Changes) -> None:
    """Raise if one of these changes would make the coming rounds another training."""
    refused = []
    for name, (old, new) in changes.items():
        if not may_change(name):
            before = "without it" if old is None else f"with {old!r}"
            refused.append(f"{name} = {_shown(new)}: rounds 1 to {round_number} ran {before}.")
    if not refused:
        return
    refused.append(
        f"{folder.path} cannot be continued with other values of these settings, because they "
        "change the training. Restore the old values in "
        f"{folder.config}, or start a new run: motley run {folder.config} --out FOLDER. "
        "Settings that may change are training.rounds, evaluation.*, run.*, engine.device and "
        "paths, with motley resume --set."
    )
    raise MotleyError("\n".join(refused))


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


# ---- the model


def require_same_model(folder: RunFolder, federation: Federation, checkpoint: ServerState) -> None:
    """Raise if config.toml was edited so that its global state differs from the checkpoint's.

    A moving average has the tensors of the global state. The states of the method and of the stages
    may have other tensors after every round; checksums tell whether they are damaged.
    """
    configured = _layout(federation.split.meta_state)
    sections = {"": checkpoint.state}
    if checkpoint.ema is not None:
        sections["ema: "] = checkpoint.ema
    for prefix, state in sections.items():
        saved = _layout(state)
        for name in (*configured, *saved):
            if configured.get(name) != saved.get(name):
                before, now = saved.get(name, "absent"), configured.get(name, "absent")
                raise MotleyError(
                    f"{folder.config} describes a different model than the checkpoint of round "
                    f"{checkpoint.round_number}. The first difference is {prefix}{name!r}: {now} "
                    f"in the configuration, {before} in the checkpoint. "
                    "Undo the change of the configuration, or start a new run."
                )


def _layout(state: State) -> dict[str, str]:
    """Return the shape and type of every tensor, as text."""
    layout = {}
    for name, tensor in state.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout[name] = f"{tuple(tensor.shape)} {dtype}"
    return layout


# ---- all of it, for commands that read a run


def newest_metadata(folder: RunFolder) -> Metadata | None:
    """Return the metadata of the newest checkpoint whose server.json is intact."""
    for checkpoint in reversed(checkpoints(folder.checkpoints)):
        with suppress(DamagedCheckpointError):
            return read_metadata(checkpoint)
    return None


def find_problems(folder: RunFolder, *, model: bool = False) -> list[str]:
    """Return one sentence per change of the folder that the run did not make.

    The tensors of checkpoints are not read here, which would take long. `model`: the model of the
    newest checkpoint is used, so report also if it is not the last round's.
    """
    problems = []
    if model:
        problems += _behind(folder)
    for checkpoint in checkpoints(folder.checkpoints)[-1:]:
        try:
            read_metadata(checkpoint)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    metadata = newest_metadata(folder)
    if metadata is None:
        return problems
    try:
        changes = changed_settings(folder, metadata, folder.read_config())
    except MotleyError:
        # It may name users' own code, which is not here.
        before, now = flat(metadata.config or {}), flat(read_toml(folder.config))
        changes = _saved_difference(before, now) if before else {}
    if changes:
        problems.append(describe_changes(folder, metadata.round_number, changes))
    problem = log_problem(folder, metadata)
    if problem:
        problems.append(problem)
    saved = metadata.facts.get("files")
    for file in _files(folder):
        expected = saved.get(file.name) if isinstance(saved, dict) else None
        current = None
        with suppress(OSError):
            current = file_sha256(file)
        if isinstance(saved, dict) and current != expected:
            what = "is missing or cannot be read" if current is None else "was changed"
            problems.append(f"{file} {what} after the run wrote it.")
    return problems


def _behind(folder: RunFolder) -> list[str]:
    """Say if the newest checkpoint is older than the last round, unless the run is going on."""
    lines = MetricsLog(folder.metrics).read()
    saved = last_round(folder.checkpoints)
    if not lines or lines[-1]["round"] <= saved or folder.is_locked():
        return []
    return [
        f"the newest checkpoint in {folder.checkpoints} is of round {saved}, and "
        f"{folder.metrics.name} goes on to round {lines[-1]['round']}. `motley resume` runs the "
        "rounds after the checkpoint again."
    ]


def describe_changes(folder: RunFolder, round_number: int, changes: Changes) -> str:
    """Say which settings were edited by hand."""
    edits = [f"{name} = {_shown(new)} (it was {old!r})" for name, (old, new) in changes.items()]
    return f"{folder.config} was changed after round {round_number}: {', '.join(edits)}."
