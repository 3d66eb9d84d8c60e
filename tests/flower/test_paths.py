"""A malicious server learns nothing about a node's files: it cannot name them, and no error quotes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from motley.config import Config, path_settings
from motley.core.errors import MotleyError
from motley.data import PARTITIONS
from motley.data.public import PUBLIC
from motley.federation import Federation
from motley.flower.arrays import pack
from motley.flower.client import app
from motley.flower.failures import LOG_BYTES, error_text, failing_as, keep_text, kind_of
from motley.flower.run_config import from_text, to_text
from motley.flower.settings import NodeSettings
from motley.methods import METHODS
from motley.models.inputs import ImageShape, shape_to_json
from motley.splits import SPLITS
from tests.conftest import chosen
from tests.flower.grid import Grid, three_nodes

# ---- which settings are paths

NAMES = {
    "preset",
    "data.name",
    *(f"data.files.{key}" for key in ("target", "client", "features", "drop", "categories")),
    *(f"data.files.{key}" for key in ("classes", "delimiter", "missing_marks")),
    "data.partition.name",
    "data.transform.variant",
    "public.name",
    "model.sizes",
    "split.name",
    "training.optimizer.name",
    "server.optimizer.name",
    "task.name",
    "task.loss",
    "task.metrics",
    "split.private",
    "server.stages.name",
    "server.stages.before",
    "model.factories",
    "model.options",
    "federation.sizes",
    "attack.name",
    "server.merge.name",
    "method.name",
    "method.cut",
    "method.teacher",
    "engine.device",
    "run.mlflow",  # may name a database, but is removed like a path (tests/runs/test_loggers.py)
}
"""Settings of free text that name no file. A new one belongs here, or has the type FilePath if it names a file."""


def free_texts(settings: type[BaseModel], where: str = "") -> Iterator[str]:
    """Yield the keys of all settings that could name a file: free strings, and paths."""
    for name, field in settings.model_fields.items():
        key = f"{where}{name}"
        for kind in plain_types(field.annotation):
            if issubclass(kind, BaseModel):
                yield from free_texts(kind, f"{key}.")
            elif issubclass(kind, str | bytes | Path):
                yield key


def plain_types(annotation: Any) -> Iterator[type]:
    """Yield the classes in an annotation, without those of a Literal's values."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    elif "Literal" not in str(annotation).partition("[")[0]:
        for inner in get_args(annotation):
            yield from plain_types(inner)


def test_every_setting_that_could_name_a_file_is_sorted_into_paths_and_names() -> None:
    """A new setting that names a file must have the type FilePath, or else nodes would take it from a server."""
    found = set(free_texts(Config))
    for entry in METHODS:
        found |= set(free_texts(entry.item.Settings, "method."))
    for entry in SPLITS:
        found |= set(free_texts(entry.item.Settings, "split."))
    for entry in PARTITIONS:
        found |= set(free_texts(entry.item, "data.partition."))
    for source in PUBLIC.classes.values():
        found |= set(free_texts(source, "public."))
    paths = {".".join(path) for path in path_settings()}
    assert found == paths | NAMES


def test_a_new_setting_that_names_a_file_would_be_noticed() -> None:
    class More(Config):
        secrets: tuple[Path | None, ...] = ()

    assert set(free_texts(More)) - set(free_texts(Config)) == {"secrets"}


# ---- a server that means harm

OTHER = shape_to_json(ImageShape(1, 9, 9))
DATA = {
    "inputs": shape_to_json(ImageShape(1, 8, 8)),
    "classes": 10,
    "task": "classification",
}
NODE = 1000


class Attacker:
    """A server that sends what it likes to one node, and reads the answers."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def ask(self, kind: str, text: str, **more: Any) -> Message:
        """Send a message with a configuration, and for a job with the state that fits it."""
        about = {
            "config": text,
            **DATA,
            "round": 1,
            "client": 0,
            "size": "resnet10",
            "client_state_round": -1,
        }
        content = {"job": ConfigRecord({**about, "forget": 0, **more})}
        if kind != "query":
            federation = Federation(three_nodes("engine.name=local"))
            content["arrays"] = pack(state=federation.job(federation.initial_state(), 1, 0).state)  # type: ignore[assignment]
        return self.send(kind, RecordDict(content))

    def send(self, kind: str, content: RecordDict) -> Message:
        """Send a message of any content."""
        message = Message(content, NODE, kind)
        message.metadata.__dict__["_message_id"] = "message"
        return app(message, Context(1, NODE, {"motley": str(self.file)}, RecordDict(), {}))

    @property
    def log(self) -> str:
        """What the node's operator can read."""
        return (self.file.parent / "node.log").read_text()


@pytest.fixture
def attacker(grid: Grid) -> Attacker:
    return Attacker(grid.nodes[NODE])


def everything_in(reply: Message) -> str:
    """Return everything in a reply except the random part of a failure's reference."""
    if reply.has_error():
        return f"{reply.error.code} {re.sub('[0-9a-f]{8}', 'REFERENCE', str(reply.error.reason))}"
    parts = []
    for name, record in sorted(reply.content.items()):
        if isinstance(record, ArrayRecord):
            parts += [f"{name}.{key} = {array.data!r}" for key, array in record.items()]
        else:
            parts.append(f"{name} = {dict(record)}")
    return "\n".join(parts)


SECRET = "client,hunter2-the-first-line\nrow 17"

ATTACKS: dict[str, tuple[str, Callable[[str], tuple[str, ...]]]] = {
    "budgets": (
        "a.csv",
        lambda file: ("federation.size_assignment=budget", f"federation.budgets={file}"),
    ),
    "budgets and sizes": (
        "a.csv",
        lambda file: (
            "federation.size_assignment=budget",
            f"federation.budgets={file}",
            "federation.sizes=['resnet10','resnet14','resnet18']",
        ),
    ),
    "partition": (
        "a.json",
        lambda file: ("data.partition.name=file", f"data.partition.path={file}"),
    ),
    "weights": ("a.safetensors", lambda file: (f"model.weights={file}",)),
    "data path": ("a.npz", lambda file: ("data.name=npz", f"data.path={file}")),
    "data root": ("digits", lambda file: (f"data.root={file}",)),
    "a name": ("a", lambda file: ("method.name=fedimpro", f"method.cut={file}")),
    "the preset's name": ("a", lambda file: ("run.keep_checkpoints=3",)),
}


@pytest.mark.parametrize("kind", ["query", "train", "train.collect"])
@pytest.mark.parametrize(("name", "settings"), ATTACKS.values(), ids=ATTACKS)
def test_a_file_that_a_server_names_is_not_read_and_not_even_looked_for(
    attacker: Attacker,
    tmp_path: Path,
    kind: str,
    name: str,
    settings: Callable[[str], tuple[str, ...]],
) -> None:
    """The answer is the same whether or not the file exists, and contains nothing of it."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / name).write_text(SECRET)
    answers = []
    for folder in ("there", "gone"):
        file = str(tmp_path / folder / name)
        text = (
            three_nodes(*settings(file))
            .to_toml()
            .replace('preset = "quickstart"', f'preset = "{file}"')
        )
        answers.append(everything_in(attacker.ask(kind, text)))
    assert answers[0] == answers[1]
    assert not re.search("hunter2|row 17|tmp|Error", answers[0].partition("arrays.")[0])


def test_a_server_that_names_its_own_paths_is_understood_without_them(
    attacker: Attacker, tmp_path: Path
) -> None:
    """Paths that a node does not need are dropped, and it trains on its own data."""
    plain = everything_in(attacker.ask("train", three_nodes().to_toml()))
    paths = (
        "data.name=npz",
        f"data.path={tmp_path}/a.npz",
        f"model.weights={tmp_path}/b",
        "data.transform.resize=8",
    )
    assert everything_in(attacker.ask("train", three_nodes(*paths).to_toml())) == plain
    assert plain.startswith("arrays.delta = ")


def test_an_honest_server_sends_no_paths(tmp_path: Path) -> None:
    mine = (
        f"data.root={tmp_path}",
        f"model.weights={tmp_path}/w",
        "federation.size_assignment=budget",
    )
    lists = ("data.partition.name=file", f"data.partition.path={tmp_path}/lists.json")
    config = three_nodes(*mine, *lists, f"federation.budgets={tmp_path}/budgets.csv")
    assert str(tmp_path) in config.to_toml() and str(tmp_path) not in to_text(config)


@pytest.mark.parametrize("method", [entry.name for entry in METHODS])
def test_no_honest_configuration_is_taken_for_one_with_paths(method: str) -> None:
    node = NodeSettings(client=0)
    config = three_nodes(*chosen(method))
    assert from_text(to_text(config), node) == config


def test_a_partition_file_is_the_nodes_own(attacker: Attacker, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text("[[0], [1], [2]]")
    text = three_nodes(
        "data.partition.name=file", f"data.partition.path={tmp_path}/theirs.json"
    ).to_toml()
    assert everything_in(attacker.ask("query", text)) == "0 node-settings REFERENCE"
    assert "data.partition: is not set." in attacker.log
    (attacker.file.parent / "mine.json").write_text("[[0, 1, 2], [3], [4]]")
    attacker.file.write_text(attacker.file.read_text() + 'partition = "mine.json"\n')
    assert "'num_examples': 3" in everything_in(attacker.ask("train", text, client=0))


# ---- what travels of a failure


def test_the_text_of_a_failure_stays_at_the_node(attacker: Attacker) -> None:
    attacker.file.write_text(
        attacker.file.read_text().replace('name = "digits"', 'name = "npz"\npath = "mine.npz"')
    )
    images, labels = np.zeros((3, 8, 8), np.uint8), np.array([17, 0, 0])
    np.savez(
        attacker.file.parent / "mine.npz",
        x_train=images,
        y_train=labels,
        x_test=images,
        y_test=labels,
    )
    reply = attacker.ask("train", three_nodes().to_toml())
    kind, _, reference = str(reply.error.reason).partition(" ")
    assert kind == "data" and re.fullmatch("[0-9a-f]{8}", reference)
    assert (
        f"failure {reference} (data): data set 'npz': train labels go from 0 to 17" in attacker.log
    )


def test_an_unexpected_error_is_a_traceback_at_the_node_and_a_kind_at_the_server(
    attacker: Attacker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Motley does not expect it, and Flower would send the exception's text, which has the path."""

    def fail(*_: object) -> None:
        raise OSError(f"{attacker.file.parent / 'occupied'}: is not expected")

    monkeypatch.setattr("motley.node.Client.train", fail)
    reply = attacker.ask("train", three_nodes().to_toml())
    assert everything_in(reply) == "0 training REFERENCE"
    for said in (attacker.log, capsys.readouterr().err):
        assert "Traceback" in said and "occupied" in said


TEXT = three_nodes().to_toml()
GUARDED = three_nodes("server.statistics.name=recalibrate", "privacy.clip=1").to_toml()
JOB = {"config": TEXT, **DATA, "round": 1, "client": 0, "size": "resnet10"}
JOB |= {"client_state_round": -1, "forget": 0}

BAD_MESSAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no job": ("query", {}, "bad-message"),
    "no table": ("query", {"job": pack(a={"b": torch.zeros(1)})}, "bad-message"),
    "no shape": ("query", {"job": ConfigRecord({"config": TEXT})}, "bad-message"),
    "shape of words": (
        "query",
        {"job": ConfigRecord({"config": TEXT, "shape": "abcd"})},
        "bad-message",
    ),
    "no TOML": ("query", {"job": ConfigRecord({**JOB, "config": "a = "})}, "bad-config"),
    "unknown key": ("query", {"job": ConfigRecord({**JOB, "config": "a = 1"})}, "bad-config"),
    "other images": ("query", {"job": ConfigRecord({**JOB, "inputs": OTHER})}, "data"),
    "other inputs": ("query", {"job": ConfigRecord({**JOB, "inputs": "[]"})}, "bad-message"),
    "another task": ("query", {"job": ConfigRecord({**JOB, "task": "chess"})}, "bad-message"),
    "no arrays": ("train", {"job": ConfigRecord(JOB)}, "bad-message"),  # type: ignore[arg-type]
    "another client": (
        "train",
        {"job": ConfigRecord({**JOB, "client": 1}), "arrays": pack()},  # type: ignore[dict-item]
        "refused-by-node",
    ),
    "another size": (
        "train.collect",
        {"job": ConfigRecord({**JOB, "size": "resnet18"}), "arrays": pack()},  # type: ignore[dict-item]
        "refused-by-node",
    ),
    "an unknown collection": (
        "train.collect",
        {"job": ConfigRecord({**JOB, "collection": "images"}), "arrays": pack()},  # type: ignore[dict-item]
        "bad-message",
    ),
    "statistics of a run without them": (
        "train.collect",
        {"job": ConfigRecord({**JOB, "collection": "statistics"}), "arrays": pack()},  # type: ignore[dict-item]
        "refused-by-node",
    ),
    "statistics of a guarded run": (
        "train.collect",
        {
            "job": ConfigRecord({**JOB, "config": GUARDED, "collection": "statistics"}),
            "arrays": pack(),
        },  # type: ignore[dict-item]
        "refused-by-node",
    ),
    "a round of words": (
        "train",
        {"job": ConfigRecord({**JOB, "round": "../x"}), "arrays": pack()},
        "bad-message",
    ),  # type: ignore[dict-item]
    "no such state": (
        "train",
        {"job": ConfigRecord(JOB), "arrays": pack(state={"a": torch.zeros(1)})},  # type: ignore[arg-type]
        "training",
    ),
    "no such app": ("evaluate", {}, "training"),
}


@pytest.mark.parametrize(("kind", "content", "failure"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_whatever_a_server_sends_the_answer_is_a_kind_and_a_reference(
    attacker: Attacker, kind: str, content: dict[str, Any], failure: str
) -> None:
    assert everything_in(attacker.send(kind, RecordDict(content))) == f"0 {failure} REFERENCE"


def test_the_servers_wording_of_any_reason_is_safe_to_print() -> None:
    assert error_text("data 0123abcd") == "failed (data), see reference 0123abcd in the node's log."
    assert error_text("greed 0123abcd") == "failed: greed 0123abcd"
    assert error_text("data 0123abcd\nmore") == "failed: more"
    assert error_text("\x1b[2Jgone\x07") == "failed: [2Jgone"
    assert error_text(None) == "failed: no reason was given" == error_text(" \n ")
    assert len(error_text("x" * 10**6)) < 600


@pytest.mark.parametrize("allocate", [torch.empty, np.empty])
def test_out_of_memory_has_its_own_kind(allocate: Callable[[int], object]) -> None:
    """Also if it was turned into a message, or happened while data were read."""
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        allocate(10**16)
    assert kind_of(raised.value) == "out-of-memory"
    message = MotleyError("the model is too large.")
    message.__cause__ = raised.value
    with pytest.raises(MotleyError) as kept, failing_as("data"):
        raise message
    assert kind_of(kept.value) == "out-of-memory"


def test_a_log_does_not_grow_for_ever(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    for _ in range(4):
        keep_text(ValueError("x" * LOG_BYTES), log)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node.log", "node.log.old"]


def test_a_log_that_cannot_be_written_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keep_text(ValueError("why"), tmp_path / "nowhere" / "node.log").startswith("training ")
    assert "ValueError: why" in capsys.readouterr().err
