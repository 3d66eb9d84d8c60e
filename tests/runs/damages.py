"""A table of damages to a run's folder, and a classification of how a command deals with each.

`python -m tests.runs.damages` tries every damage with every command and prints how many were
silent, a traceback, named or harmless.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from motley.client.state_store import ClientStateStore
from motley.data import load_dataset
from motley.runs.checkpoint import checkpoints, fingerprint, load_checkpoint
from motley.runs.metrics import MetricsLog
from tests.cli.conftest import Answer, call

#: A run in which every file of a run folder exists and matters: an EMA, a method with server state
#: and client states, a server optimizer with a moment, and scores of clients.
SETTINGS = (
    "data.name=npz",
    "model.sizes=['mlp1','mlp2']",
    "federation.clients=4",
    "federation.clients_per_round=3",
    "training.rounds=4",
    "training.steps=2",
    "method.name=scaffold",
    "server.ema_decay=0.5",
    "server.optimizer.name=momentum",
    "evaluation.per_client=round",
    "evaluation.client_test_fraction=0.2",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=2",
    "run.tensorboard=false",
)
NEWEST = "checkpoints/round-000004"
#: Levels of nested JSON or TOML that no parser written with recursion survives.
DEPTH = 100_000

Damage = Callable[[Path], None]
#: Every damage by name. "metrics: a line lost" is about metrics.jsonl.
DAMAGES: dict[str, Damage] = {}


@dataclass(frozen=True)
class Base:
    """An undamaged run, its data file, and the results of all commands on it."""

    run: Path
    data: Path
    inputs: Path
    results: dict[str, object]


@dataclass(frozen=True)
class Verdict:
    """How a command dealt with a damage."""

    #: named, harmless, silent or traceback.
    kind: str
    answer: Answer
    #: Whether the command's result is the one without the damage.
    same: bool


def make_base(folder: Path) -> Base:
    """Train the run that is damaged, and note the results of every command."""
    digits = load_dataset("digits")
    data = folder / "data.npz"
    np.savez(
        data,
        x_train=digits.train.inputs[:160],
        y_train=digits.train.targets[:160],
        x_test=digits.test.inputs[:60],
        y_test=digits.test.targets[:60],
    )
    inputs = folder / "inputs.npy"
    np.save(inputs, digits.test.inputs[:2])
    run = folder / "base"
    settings = (*SETTINGS, f"data.path={data}")
    words = [word for setting in settings for word in ("--set", setting)]
    answer = call("run", "--preset", "digits-small", *words, "--out", run)
    assert answer.code == 0, answer.err
    base = Base(run, data, inputs, {})
    for command in COMMANDS:
        copy = copied(base, folder / "damaged" / "run")
        answer = run_command(command, base, copy)
        assert answer.code == 0, answer.err
        assert not _warnings(answer), answer.err
        base.results[command] = result_of(command, copy, answer)
    return base


def copied(base: Base, path: Path) -> Path:
    """Return a copy of the run that may be damaged, replacing an earlier one."""
    if path.parent.exists():
        shutil.rmtree(path.parent)
    path.parent.mkdir(parents=True)
    shutil.copytree(base.run, path)
    return path


# ---- commands

COMMANDS: dict[str, Callable[[Base, Path], tuple[object, ...]]] = {
    "resume": lambda base, run: ("resume", run, "--rounds", 5),
    "show": lambda base, run: ("show", run),
    "show --json": lambda base, run: ("show", run, "--json"),
    "report": lambda base, run: ("report", run, "-o", run.parent / "report.html"),
    "list runs": lambda base, run: ("list", "runs", run.parent),
    "export": lambda base, run: (
        *("export", run, "--size", "mlp1"),
        *("--test-examples", 0, "-o", run.parent / "exported"),
    ),
    "predict": lambda base, run: ("predict", run, base.inputs, "--size", "mlp1", "--json"),
    "analyze": lambda base, run: ("analyze", "sizes", run, "-o", run.parent / "analysis"),
}


def run_command(command: str, base: Base, run: Path) -> Answer:
    """Call a command on a run."""
    return call(*COMMANDS[command](base, run))


def result_of(command: str, run: Path, answer: Answer) -> object:
    """Return everything that a command computed, without paths and times."""
    if command == "resume":
        return _result_of_resume(run)
    if command == "report":
        page = (run.parent / "report.html").read_text()
        return re.sub(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "", page)
    if command == "export":
        return (run.parent / "exported" / "model.safetensors").read_bytes()
    if command == "analyze":
        return (run.parent / "analysis" / "sizes.csv").read_text()
    return answer.out


def _result_of_resume(run: Path) -> object:
    server = load_checkpoint(run / "checkpoints")
    assert server is not None
    store = ClientStateStore(run / "clients")
    states = [
        (client, number, fingerprint(store.get(client, number)))
        for client, number in server.client_state_rounds.items()
    ]
    lines = MetricsLog(run / "metrics.jsonl").read()
    for line in lines:
        del line["seconds"]
    return (
        server.round_number,
        fingerprint(server.state),
        fingerprint(server.ema or {}),
        fingerprint(server.method_state),
        {name: fingerprint(state) for name, state in server.stage_states.items()},
        states,
        lines,
        (run / "client_scores.jsonl").read_text(),
    )


def try_damage(name: str, command: str, base: Base, folder: Path) -> Verdict:
    """Damage a copy of the run, call a command on it and classify its behaviour."""
    run = copied(base, folder / "damaged" / "run")
    data = base.data.read_bytes()
    try:
        if name.startswith("data:"):
            DAMAGES[name](base.data)
        else:
            DAMAGES[name](run)
        return _verdict(command, base, run)
    finally:
        base.data.write_bytes(data)


def _verdict(command: str, base: Base, run: Path) -> Verdict:
    try:
        answer = run_command(command, base, run)
    except Exception as error:
        return Verdict("traceback", Answer(1, "", f"{type(error).__name__}: {error}"), False)
    said = answer.err + answer.out
    if answer.code == 1 or "Traceback" in said or "bug in Motley" in said:
        return Verdict("traceback", answer, False)
    if command == "report" and answer.code == 0:
        page = (run.parent / "report.html").read_text()
        if "The partition cannot be drawn here" in page or "cannot be read" in page:
            return Verdict("named", answer, False)
    if answer.code != 0:
        return Verdict("named" if answer.err.strip() else "silent", answer, False)
    try:
        same = result_of(command, run, answer) == base.results[command]
    except Exception:
        same = False
    if _warnings(answer):
        return Verdict("named", answer, same)
    return Verdict("harmless" if same else "silent", answer, same)


def _warnings(answer: Answer) -> bool:
    """Whether a command that succeeded said that something is wrong with the run."""
    said = ("unreadable:", "damaged:", "There are no runs in")
    return "motley: warning:" in answer.err or any(text in answer.out for text in said)


# ---- damages


def damage(name: str) -> Callable[[Damage], Damage]:
    """Add a function to the table."""

    def add(function: Damage) -> Damage:
        assert name not in DAMAGES
        DAMAGES[name] = function
        return function

    return add


def _add_files(prefix: str, file: str, kinds: str) -> None:
    """Add the damages that any file can have."""
    contents: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda content: b"",
        "truncated": _truncated,
        "garbage": lambda content: b"\x93" * len(content),
        "not utf-8": lambda content: content[:20] + b"\xff\xfe" + content[20:],
    }
    for kind in kinds.split(", "):
        if kind == "missing":
            DAMAGES[f"{prefix}: missing"] = lambda run: (run / file).unlink()
        elif kind == "a folder":
            DAMAGES[f"{prefix}: a folder"] = lambda run: _to_folder(run / file)
        else:
            change = contents[kind]
            DAMAGES[f"{prefix}: {kind}"] = lambda run, change=change: _rewrite(run / file, change)


def _truncated(content: bytes) -> bytes:
    """Return half of a file. A TOML file ends before a value: after a whole line it would be valid."""
    half = content[: len(content) // 2]
    last_assignment = half.rfind(b" = ")
    return half if last_assignment < 0 else half[: last_assignment + 3]


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _replace(prefix: str, file: str, edits: dict[str, tuple[str, str]]) -> None:
    """Add damages that replace the first occurrence of a text."""

    def replacing(old: str, new: str) -> Damage:
        def replace(run: Path) -> None:
            text = (run / file).read_text()
            assert old in text, f"{old!r} is not in {file}"
            (run / file).write_text(text.replace(old, new, 1))

        return replace

    for name, (old, new) in edits.items():
        DAMAGES[f"{prefix}: {name}"] = replacing(old, new)


ALL = "missing, empty, truncated, garbage, not utf-8, a folder"

# config.toml
_add_files("config", "config.toml", ALL)
_replace(
    "config",
    "config.toml",
    {
        "seed edited": ("seed = 1", "seed = 2"),
        "lr edited": ("lr = 0.001", "lr = 0.01"),
        "method edited": ('name = "scaffold"', 'name = "fedavg"'),
        "sizes edited": ('"mlp2"', '"mlp3"'),
        "clients per round edited": ("clients_per_round = 3", "clients_per_round = 2"),
        "ema decay edited": ("ema_decay = 0.5", "ema_decay = 0.9"),
        "steps edited": ("steps = 2", "steps = 3"),
        "rounds edited": ("rounds = 4", "rounds = 7"),
        "fewer rounds than were run": ("rounds = 4", "rounds = 2"),
        "checkpoint_every edited": ("checkpoint_every = 1", "checkpoint_every = 2"),
        "evaluation edited": ("last_k = 5", "last_k = 3"),
        "a comment added": ("seed = 1", "# mine\nseed = 1"),
        "unknown key": ("seed = 1", "seed = 1\nseeds = 3"),
        "wrong type": ("rounds = 4", 'rounds = "four"'),
        "table for a number": ("rounds = 4", "rounds = { a = 1 }"),
        "negative rounds": ("rounds = 4", "rounds = -4"),
        "huge number": ("seed = 1", f"seed = {10**30}"),
        "infinite lr": ("lr = 0.001", "lr = inf"),
        "nan lr": ("lr = 0.001", "lr = nan"),
        "markup in a name": ('name = "npz"', 'name = "[red]"'),
        "closing markup in a name": ('name = "scaffold"', 'name = "[/]"'),
        "markup in the preset": ('preset = "digits-small"', 'preset = "[/]"'),
        "deep array": ("seed = 1", f"seed = {'[' * DEPTH}{']' * DEPTH}"),
        "null characters": ("seed = 1", "seed = 1\x00"),
        "path with a null character": ("data.npz", "data\\u0000.npz"),
    },
)


@damage("config: line ends of windows")
def _(run: Path) -> None:
    _rewrite(run / "config.toml", lambda content: content.replace(b"\n", b"\r\n"))


# metrics.jsonl
_add_files("metrics", "metrics.jsonl", "missing, empty, garbage, a folder")


def _lines(prefix: str, file: str, edits: dict[str, Callable[[list[str]], object]]) -> None:
    """Add damages that change a list of lines in place, or return another."""

    def editing(edit: Callable[[list[str]], object]) -> Damage:
        def change(run: Path) -> None:
            lines = (run / file).read_text().splitlines()
            before = list(lines)
            edit(lines)
            assert lines != before
            (run / file).write_text("".join(line + "\n" for line in lines))

        return change

    for name, edit in edits.items():
        DAMAGES[f"{prefix}: {name}"] = editing(edit)


def _line(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[list[str]], None]:
    """Return an edit of the object in one line."""

    def edit(lines: list[str]) -> None:
        value = json.loads(lines[number])
        change(value)
        lines[number] = json.dumps(value)

    return edit


def _set(number: int, key: str, value: Any) -> Callable[[list[str]], None]:
    """Return an edit of one key of one line; dots lead into tables."""

    def change(line: dict[str, Any]) -> None:
        *tables, last = key.split(".")
        for table in tables:
            line = line[table]
        line[last] = value

    return _line(number, change)


_lines(
    "metrics",
    "metrics.jsonl",
    {
        "first line lost": lambda lines: lines.pop(0),
        "middle line lost": lambda lines: lines.pop(2),
        "last line lost": lambda lines: lines.pop(),
        "line doubled": lambda lines: lines.insert(1, lines[1]),
        "last line doubled": lambda lines: lines.append(lines[-1]),
        "lines swapped": lambda lines: lines.insert(0, lines.pop(1)),
        "accuracy edited": _set(1, "accuracy.mean", 0.9999),
        "accuracy of the last line edited": _set(3, "accuracy.mean", 0.9999),
        "round edited": _set(1, "round", 9),
        "negative round": _set(0, "round", -1),
        "round is true": _set(0, "round", True),
        "bytes edited": _set(2, "bytes.up", 1),
        "{}": lambda lines: lines.insert(1, "{}"),
        "null": lambda lines: lines.insert(1, "null"),
        "a list": lambda lines: lines.insert(1, "[1, 2]"),
        "blank line": lambda lines: lines.insert(1, ""),
        "deep line": lambda lines: lines.insert(1, "[" * DEPTH + "]" * DEPTH),
        "deep last line": lambda lines: lines.append("[" * DEPTH + "]" * DEPTH),
        "deep value": lambda lines: lines.__setitem__(
            1, lines[1][:-1] + ', "metrics": ' + '{"a":' * DEPTH + "1" + "}" * DEPTH + "}"
        ),
        "NaN": _set(1, "accuracy.mlp1", float("nan")),
        "Infinity": _set(1, "accuracy.mean", float("inf")),
        "-Infinity in seconds": _set(1, "seconds.train", float("-inf")),
        "NaN loss": _set(1, "train_loss", float("nan")),
        "huge integer": _set(1, "bytes.down", 10**400),
        "a number of 5,000 digits": lambda lines: lines.__setitem__(
            1, lines[1].replace('"down": ', f'"down": {"9" * 5000}', 1)
        ),
        "huge round": _set(3, "round", 10**30),
        "clients a text": _set(1, "clients", "x"),
        "accuracy a list": _set(1, "accuracy", [1]),
        "accuracy empty": _set(1, "accuracy", {}),
        "loss a text": _set(3, "loss", "x"),
        "train_loss a list": _set(3, "train_loss", [1]),
        "class_accuracy a number": _set(3, "class_accuracy", 3),
        "class_accuracy of texts": _set(3, "class_accuracy", {"mlp1": ["x"]}),
        "epsilon a text": _set(3, "epsilon", "x"),
        "client_scores empty": _set(3, "client_scores", {}),
        "client_scores without numbers": _set(3, "client_scores", {"a": 1}),
        "client_scores of texts": _set(3, "client_scores.mean", "x"),
        "refused a number": _set(3, "refused", 3),
        "repeated a number": _set(3, "repeated", 3),
        "idle a text": _set(3, "idle", "x"),
        "metric a text": _set(3, "metric", "x"),
        "markup in a size": _line(
            1, lambda line: line["accuracy"].update({"[red]": 1.0, "[/]": 0.5})
        ),
        "markup in a metric": _line(
            3, lambda line: line.setdefault("metrics", {}).update({"a/[/]": 1.0})
        ),
    },
)


@damage("metrics: last line truncated")
def _(run: Path) -> None:
    _rewrite(run / "metrics.jsonl", lambda content: content[:-40])


@damage("metrics: incomplete line of a round that was not saved")
def _(run: Path) -> None:
    _rewrite(run / "metrics.jsonl", lambda content: content + b'{"round": 5, "accu')


@damage("metrics: not utf-8")
def _(run: Path) -> None:
    _rewrite(run / "metrics.jsonl", lambda content: content.replace(b'"mlp1"', b'"mlp\xff"', 1))


@damage("metrics: byte order mark")
def _(run: Path) -> None:
    _rewrite(run / "metrics.jsonl", lambda content: b"\xef\xbb\xbf" + content)


@damage("metrics: line ends of windows")
def _(run: Path) -> None:
    _rewrite(run / "metrics.jsonl", lambda content: content.replace(b"\n", b"\r\n"))


# client_scores.jsonl
_add_files("client scores", "client_scores.jsonl", "missing, empty, garbage, a folder")
_lines(
    "client scores",
    "client_scores.jsonl",
    {
        "line lost": lambda lines: lines.pop(1),
        "line doubled": lambda lines: lines.insert(1, lines[1]),
        "score edited": lambda lines: lines.__setitem__(
            1, lines[1].replace('"examples":[', '"examples":[1', 1)
        ),
        "null": lambda lines: lines.insert(1, "null"),
        "deep": lambda lines: lines.insert(1, "[" * DEPTH + "]" * DEPTH),
        "last line a list": lambda lines: lines.append("[1]"),
        "lists of unlike lengths": lambda lines: lines.__setitem__(
            3, lines[3].replace('"examples":[', '"examples":[1,', 1)
        ),
    },
)

# environment.json and plugins.json
_add_files("environment", "environment.json", ALL)


@damage("environment: deep")
def _(run: Path) -> None:
    (run / "environment.json").write_text("[" * DEPTH + "]" * DEPTH)


@damage("environment: a list")
def _(run: Path) -> None:
    (run / "environment.json").write_text("[1]")


@damage("environment: other types")
def _(run: Path) -> None:
    values = {"motley": {"a": 1}, "commit": 3, "torch": None, "gpu": ["x"], "cores": "many"}
    (run / "environment.json").write_text(json.dumps(values))


@damage("environment: markup")
def _(run: Path) -> None:
    (run / "environment.json").write_text(json.dumps({"motley": "[/]", "gpu": "[red]"}))


@damage("plugins: deep")
def _(run: Path) -> None:
    (run / "plugins.json").write_text("[" * DEPTH + "]" * DEPTH)


@damage("plugins: other types")
def _(run: Path) -> None:
    (run / "plugins.json").write_text(
        json.dumps([{"setting": 1, "name": 2, "path": 3, "folder": 4, "folder_from_run": 5}])
    )


@damage("plugins: a folder")
def _(run: Path) -> None:
    (run / "plugins.json").mkdir()


# server.json
_add_files("server", f"{NEWEST}/server.json", ALL)


def _server(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    def edit(run: Path) -> None:
        file = run / NEWEST / "server.json"
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    DAMAGES[f"server: {name}"] = edit


_server("round edited", lambda values: values.update(round=3))
_server("round huge", lambda values: values.update(round=10**30))
_server("round NaN", lambda values: values.update(round=float("nan")))
_server("round infinite", lambda values: values.update(round=float("inf")))
_server("round a text", lambda values: values.update(round="four"))
_server("section lost", lambda values: values["sections"].remove("ema"))
_server("sections of the method lost", lambda values: values["sections"].remove("method_state"))
_server("section added", lambda values: values["sections"].append("other"))
_server("section outside", lambda values: values["sections"].append("../../../x"))
_server("sections a number", lambda values: values.update(sections=3))
_server("ledger a list", lambda values: values.update(ledger=[1]))
_server("ledger edited", lambda values: values.update(ledger={"rounds": "x"}))
_server("seed in its configuration edited", lambda values: values["config"].update(seed=9))
_server("configuration a number", lambda values: values.update(config=3))
_server("configuration lost", lambda values: values.pop("config"))


def _client_state_rounds(run: Path) -> dict[int, int]:
    """Return the rounds of the clients' states in the newest checkpoint."""
    tensors = load_file(run / NEWEST / "client_state_rounds.safetensors")
    return dict(zip(tensors["clients"].tolist(), tensors["numbers"].tolist(), strict=True))


def _rounds(name: str, change: Callable[[dict[int, int]], object]) -> None:
    def edit(run: Path) -> None:
        rounds = _client_state_rounds(run)
        change(rounds)
        tensors = {
            "clients": torch.tensor(list(rounds), dtype=torch.int32),
            "numbers": torch.tensor(list(rounds.values()), dtype=torch.int32),
        }
        save_file(tensors, run / NEWEST / "client_state_rounds.safetensors")

    DAMAGES[f"client_state_rounds: {name}"] = edit


_rounds("client's round edited", lambda rounds: rounds.update(dict.fromkeys(rounds, 1)))
_rounds("a client lost", lambda rounds: rounds.popitem())
_rounds("unknown client", lambda rounds: rounds.update({99: 1}))


@damage("server: deep")
def _(run: Path) -> None:
    (run / NEWEST / "server.json").write_text("[" * DEPTH + "]" * DEPTH)


@damage("server: null")
def _(run: Path) -> None:
    (run / NEWEST / "server.json").write_text("null")


# tensors
for _name in ("state", "ema", "method_state", "stage-optimizer", "client_state_rounds"):
    _add_files(_name, f"{NEWEST}/{_name}.safetensors", "missing, empty, truncated, garbage")
_add_files("state", f"{NEWEST}/state.safetensors", "a folder")


def _tensors(section: str, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    def edit(run: Path) -> None:
        file = run / NEWEST / f"{section}.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    DAMAGES[f"{section}: {name}"] = edit


def _largest(tensors: dict[str, torch.Tensor]) -> str:
    return max(tensors, key=lambda name: tensors[name].numel())


def _flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors[_largest(tensors)].view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def _change_one(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = _largest(tensors)
        tensors[name] = change(tensors[name])

    return edit


for _name in ("state", "ema", "method_state", "stage-optimizer"):
    _tensors(_name, "bit flipped", _flip)
    _tensors(_name, "NaN", _change_one(lambda tensor: torch.full_like(tensor, torch.nan)))
    _tensors(_name, "infinite", _change_one(lambda tensor: torch.full_like(tensor, torch.inf)))
    _tensors(_name, "other dtype", _change_one(lambda tensor: tensor.double()))
    _tensors(_name, "half precision", _change_one(lambda tensor: tensor.half()))
    _tensors(_name, "other shape", _change_one(lambda tensor: tensor[:-1].contiguous()))
    _tensors(_name, "extra tensor", lambda tensors: tensors.update(other=torch.ones(3)))
    _tensors(_name, "tensor lost", lambda tensors: tensors.pop(_largest(tensors)))


@damage("state: header longer than the file")
def _(run: Path) -> None:
    _rewrite(
        run / NEWEST / "state.safetensors",
        lambda content: (2**40).to_bytes(8, "little") + content[8:],
    )


@damage("state: exchanged with the EMA")
def _(run: Path) -> None:
    folder = run / NEWEST
    (folder / "state.safetensors").rename(folder / "x")
    (folder / "ema.safetensors").rename(folder / "state.safetensors")
    (folder / "x").rename(folder / "ema.safetensors")


@damage("state: of an older checkpoint")
def _(run: Path) -> None:
    shutil.copy(run / "checkpoints/round-000003/state.safetensors", run / NEWEST)


# folders
@damage("checkpoints: a file")
def _(run: Path) -> None:
    _to_file(run / "checkpoints")


@damage("checkpoints: newest is a file")
def _(run: Path) -> None:
    _to_file(run / NEWEST)


@damage("checkpoints: newest is empty")
def _(run: Path) -> None:
    shutil.rmtree(run / NEWEST)
    (run / NEWEST).mkdir()


@damage("checkpoints: newest lost")
def _(run: Path) -> None:
    shutil.rmtree(run / NEWEST)


@damage("checkpoints: oldest lost")
def _(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/round-000003")


@damage("checkpoints: all lost")
def _(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


@damage("checkpoints: newest under another number")
def _(run: Path) -> None:
    (run / NEWEST).rename(run / "checkpoints/round-000009")


@damage("checkpoints: all damaged")
def _(run: Path) -> None:
    for checkpoint in checkpoints(run / "checkpoints"):
        _rewrite(checkpoint / "state.safetensors", lambda content: content[:-1] + b"\x93")


@damage("checkpoints: a copy beside them")
def _(run: Path) -> None:
    shutil.copytree(run / NEWEST, run / "checkpoints/round-000004 (copy)")


@damage("checkpoints: an unfinished one")
def _(run: Path) -> None:
    shutil.copytree(run / NEWEST, run / "checkpoints/unfinished-000005")


@damage("checkpoints: a file among them")
def _(run: Path) -> None:
    (run / "checkpoints/unfinished-notes").write_text("mine")


@damage("run: a file")
def _(run: Path) -> None:
    _to_file(run)


@damage("run: empty")
def _(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@damage("lock: missing")
def _(run: Path) -> None:
    (run / ".lock").unlink()


@damage("lock: a folder")
def _(run: Path) -> None:
    _to_folder(run / ".lock")


@damage("lock: not empty")
def _(run: Path) -> None:
    (run / ".lock").write_bytes(b"\xff" * 100)


# client states


def _states(run: Path) -> Path:
    (file,) = (run / "clients").glob("*.sqlite")
    return file


def _sql(name: str, statement: str) -> None:
    def edit(run: Path) -> None:
        with sqlite3.connect(_states(run)) as database:
            (table,) = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            newest = _client_state_rounds(run)
            client = min(newest, key=lambda client: (-newest[client], client))
            words = {"table": table[0], "client": client, "round": newest[client]}
            database.execute(statement.format(**words))
        database.close()

    DAMAGES[f"client states: {name}"] = edit


_sql(
    "all lost",
    "DELETE FROM {table}",
)
_sql("one lost", "DELETE FROM {table} WHERE client = {client} AND round = {round}")
_sql(
    "under another round",
    "UPDATE {table} SET round = 77 WHERE client = {client} AND round = {round}",
)
_sql(
    "content empty",
    "UPDATE {table} SET content = x'' WHERE client = {client} AND round = {round}",
)
_sql(
    "content a text",
    "UPDATE {table} SET content = 'x' WHERE client = {client} AND round = {round}",
)
_sql(
    "content a number",
    "UPDATE {table} SET content = 3 WHERE client = {client} AND round = {round}",
)
_sql("table lost", "DROP TABLE {table}")
_sql("another table", "ALTER TABLE {table} RENAME TO other")


@damage("client states: bit flipped")
def _(run: Path) -> None:
    with sqlite3.connect(_states(run)) as database:
        (table,) = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        rows = database.execute(f"SELECT rowid, content FROM {table[0]}").fetchall()
        for row, content in rows:
            flipped = bytearray(content)
            flipped[-2] ^= 1
            database.execute(
                f"UPDATE {table[0]} SET content = ? WHERE rowid = ?", (bytes(flipped), row)
            )
    database.close()


@damage("client states: of two clients exchanged")
def _(run: Path) -> None:
    with sqlite3.connect(_states(run)) as database:
        (table,) = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        newest = _client_state_rounds(run)
        # Sizes alternate between clients: 0 and 2 have states of the same shapes.
        rows = []
        for client in sorted(newest):
            where = f"WHERE client = {client} AND round = {newest[client]}"
            (row,) = database.execute(f"SELECT rowid, content FROM {table[0]} {where}")
            rows.append(row)
        first = rows[0]
        second = next(row for row in rows[1:] if len(row[1]) == len(first[1]))
        for (row, _), (_, content) in ((first, second), (second, first)):
            database.execute(f"UPDATE {table[0]} SET content = ? WHERE rowid = ?", (content, row))
    database.close()


for _kind in ("missing", "empty", "truncated", "garbage", "a folder"):

    def _file_damage(run: Path, kind: str = _kind) -> None:
        file = _states(run)
        if kind == "missing":
            file.unlink()
        elif kind == "a folder":
            _to_folder(file)
        else:
            content = file.read_bytes()
            half = content[: len(content) // 2]
            file.write_bytes(
                {"empty": b"", "truncated": half, "garbage": b"\x93" * len(content)}[kind]
            )

    DAMAGES[f"client states: file {_kind}"] = _file_damage


@damage("client states: folder a file")
def _(run: Path) -> None:
    _to_file(run / "clients")


@damage("client states: folder lost")
def _(run: Path) -> None:
    shutil.rmtree(run / "clients")


# the data


def _arrays(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)


@damage("data: one label changed")
def _(path: Path) -> None:
    _arrays(path, lambda arrays: arrays["y_train"].__setitem__(7, (arrays["y_train"][7] + 1) % 10))


@damage("data: one pixel changed")
def _(path: Path) -> None:
    _arrays(path, lambda arrays: arrays["x_train"].__setitem__((50, 3, 3), 77))


@damage("data: one test label changed")
def _(path: Path) -> None:
    _arrays(path, lambda arrays: arrays["y_test"].__setitem__(7, (arrays["y_test"][7] + 1) % 10))


@damage("data: other order")
def _(path: Path) -> None:
    def turn(arrays: dict[str, np.ndarray]) -> None:
        for name in ("x_train", "y_train"):
            arrays[name] = arrays[name][::-1].copy()

    _arrays(path, turn)


@damage("data: fewer examples")
def _(path: Path) -> None:
    def cut(arrays: dict[str, np.ndarray]) -> None:
        for name in ("x_train", "y_train"):
            arrays[name] = arrays[name][:-10]

    _arrays(path, cut)


@damage("data: missing")
def _(path: Path) -> None:
    path.unlink()


@damage("data: truncated")
def _(path: Path) -> None:
    _rewrite(path, lambda content: content[: len(content) // 2])


@damage("data: compressed, same values")
def _(path: Path) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **arrays)


# ---- all of it


def digest(text: str) -> str:
    """Return a short hash, to tell long outputs apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def main(pattern: str = "", only: str = "") -> None:
    """Try every damage whose name contains `pattern` with every command, and print the counts."""
    counts: dict[str, Counter[str]] = {command: Counter() for command in COMMANDS}
    worst: Counter[str] = Counter()
    order = ("traceback", "silent", "named", "harmless")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = make_base(folder)
        for name in DAMAGES:
            if pattern not in name:
                continue
            kinds = []
            for command in COMMANDS:
                if only and command != only:
                    continue
                verdict = try_damage(name, command, base, folder)
                kinds.append(verdict.kind)
                counts[command][verdict.kind] += 1
                said = (verdict.answer.err.strip() or verdict.answer.out.strip()).replace("\n", " ")
                said = said.replace(str(folder), "") if verdict.kind != "harmless" else ""
                print(f"{verdict.kind:9} {command:12} {name:50} {said[:230]}", flush=True)
            worst[min(kinds, key=order.index)] += 1
    for command, counter in counts.items():
        print(f"{command:12}", dict(counter))
    print("worst of all commands, per damage:", dict(worst), "of", sum(worst.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
