"""MLflow and Weights & Biases: off unless asked, one run per run, and never in the way of training."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motley.core.errors import MotleyError
from motley.flower.run_config import to_text, without_paths
from motley.runs.callbacks import Callback
from motley.runs.loggers import Guarded, RemoteLogger, numbers_of
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import tiny_config
from tests.runs.crash import InterruptAt

FAST = (
    "model.sizes=['mlp1','mlp2']",
    "training.batch_size=64",
    "training.epochs=0.5",
    "training.rounds=3",
    "run.checkpoint_every=2",
    "run.tensorboard=false",
)


class FailAt(Callback):
    """Raises an exception in a round."""

    def __init__(self, round_number: int) -> None:
        self.round_number = round_number

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if record.round_number == self.round_number:
            raise OSError("the disk is on fire")


def expected_series(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a logger must show for a run: metric -> list of (round, value)."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in MetricsLog(folder / "metrics.jsonl").read():
        for group in ("accuracy", "loss"):
            for name, value in line.get(group, {}).items():
                series.setdefault(f"{group}/{name}", []).append((line["round"], value))
        series.setdefault("train_loss", []).append((line["round"], line["train_loss"]))
    return series


def test_nothing_is_logged_unless_asked(tmp_path: Path) -> None:
    start_run(tiny_config(*FAST, "training.rounds=1"), tmp_path / "run")
    assert not list(tmp_path.rglob("*mlflow*")) and not list(tmp_path.rglob("*wandb*"))


def test_every_finite_number_of_a_round_is_a_metric() -> None:
    record = RoundRecord(
        round_number=3,
        clients=[1, 2],
        refused={1: "a reason"},
        train_loss=0.5,
        metrics={"inco/layer1.0/theta": 0.25, "method/pool": float("nan")},
        seconds={"train": 1.5},
        bytes_down=7,
    )
    assert numbers_of(record) == {
        "inco/layer1.0/theta": 0.25,
        "train_loss": 0.5,
        "seconds/train": 1.5,
        "bytes/down": 7,
        "bytes/up": 0,
    }


# ---- MLflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return library


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs, whose database is shared: MLflow takes seconds to create one."""
    return tmp_path_factory.mktemp("runs")


def mlflow_run(mlflow: Any, runs: Path, name: str) -> tuple[Any, Any]:
    """Return a client of MLflow and its only run of a name."""
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("motley")
    condition = f"attributes.run_name = '{name}'"
    (run,) = client.search_runs([experiment.experiment_id], condition)
    return client, run


def test_mlflow_has_the_configuration_and_every_round_once(mlflow: Any, runs: Path) -> None:
    """The run is interrupted after round 3 was logged; resuming continues the same MLflow run."""
    folder = runs / "mine"
    with pytest.raises(KeyboardInterrupt):
        start_run(
            tiny_config(*FAST, "training.rounds=4", "run.mlflow=true"), folder, [InterruptAt(3)]
        )
    assert mlflow_run(mlflow, runs, "mine")[1].info.status == "KILLED"
    resume_run(folder)
    client, run = mlflow_run(mlflow, runs, "mine")
    assert run.info.status == "FINISHED"
    assert run.data.params["training.rounds"] == "4"
    assert run.data.params["model.sizes"] == "['mlp1', 'mlp2']"
    for name, points in expected_series(folder).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((metric.step, metric.value) for metric in history) == points
        assert len(points) == 4


def test_mlflow_is_told_of_a_failure(mlflow: Any, runs: Path) -> None:
    config = tiny_config(*FAST, f"run.mlflow=sqlite:///{runs / 'mlflow.db'}")
    with pytest.raises(OSError, match="on fire"):
        start_run(config, runs / "failing", [FailAt(2)])
    assert mlflow_run(mlflow, runs, "failing")[1].info.status == "FAILED"


# ---- W&B


def test_wandb_logs_offline_and_resuming_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    config = tiny_config(*FAST, "run.wandb=offline")
    with pytest.raises(KeyboardInterrupt):
        start_run(config, tmp_path / "run", [InterruptAt(3)])
    resume_run(tmp_path / "run")
    assert wandb_rounds(tmp_path / "run") == [1, 2, 3]
    accuracy = expected_series(tmp_path / "run")["accuracy/mlp1"]
    assert wandb_series(tmp_path / "run", "accuracy/mlp1") == accuracy
    # offline-run-TIME-ID, and "-1" after it if two were started within one second.
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len({folder.name.split("-")[3] for folder in folders}) == 1


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a W&B file: LevelDB's log format, after 7 bytes of its own."""
    content, at, parts = file.read_bytes(), 7, b""
    block = 32768
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block is filled up
            at += block - at % block
            continue
        length, fragment = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if fragment in (1, 4):  # a whole record, or the last fragment of one
            yield parts
            parts = b""


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """Return all logged rows of the files that `wandb sync` would send, oldest file first."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {}
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    row[name] = json.loads(item.value_json)
                rows.append(row)
    return rows


def wandb_rounds(folder: Path) -> list[int]:
    return [int(row["round"]) for row in wandb_history(folder)]


def wandb_series(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(int(row["round"]), row[name]) for row in wandb_history(folder)]


# ---- failures


class Broken(RemoteLogger):
    """A logger whose server goes away in round 2."""

    setting = "run.broken"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.calls: list[str] = []

    def open(self, config: Any) -> None:
        self.calls.append("open")

    def log(self, round_number: int, numbers: Any) -> None:
        self.calls.append(f"log {round_number}")
        if round_number == 2:
            raise ConnectionError("the server is gone")

    def close(self, ending: Any) -> None:
        self.calls.append("close")


def test_a_logger_that_fails_is_turned_off_and_the_run_goes_on(tmp_path: Path) -> None:
    logger = Broken(tmp_path / "broken.json")
    with pytest.warns(
        UserWarning, match="run.broken: logging stopped in round 2: .*is gone"
    ) as seen:
        start_run(tiny_config(*FAST), tmp_path / "run", [Guarded(logger)])
    assert len([warning for warning in seen if "run.broken" in str(warning.message)]) == 1
    assert logger.calls == ["open", "log 1", "log 2"]
    assert len(MetricsLog(tmp_path / "run" / "metrics.jsonl").read()) == 3


def test_a_database_that_cannot_be_opened_does_not_stop_the_run(
    mlflow: Any, tmp_path: Path
) -> None:
    config = tiny_config(*FAST, "training.rounds=1", "run.mlflow=no-such-scheme://x")
    with pytest.warns(UserWarning, match="run.mlflow: logging stopped in round 0"):
        start_run(config, tmp_path / "run")
    assert len(MetricsLog(tmp_path / "run" / "metrics.jsonl").read()) == 1


def test_nodes_do_not_see_the_tracking_server() -> None:
    config = tiny_config(*FAST, "run.mlflow=https://me:secret@example.org")
    assert "secret" not in to_text(config)
    assert "mlflow" not in without_paths(config.model_dump(mode="json"))["run"]


def test_wrong_values_are_refused() -> None:
    with pytest.raises(MotleyError, match=r"run.wandb = 'of'"):
        tiny_config("run.wandb=of")
