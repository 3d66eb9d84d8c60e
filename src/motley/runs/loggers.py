"""Loggers that other tools read: MLflow and Weights & Biases, both off unless a run asks for them.

Each is a callback. The parameters are the flattened configuration, and the metrics are the numbers
of the round's line in metrics.jsonl: `accuracy/SIZE`, `loss/SIZE`, `train_loss`, `seconds/train`
and so on. A logger must never stop a training that may have run for days, so `Guarded` turns it off
at its first failure. metrics.jsonl has every round in any case.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from motley.config import Config
from motley.core.errors import MotleyError
from motley.extras import require
from motley.federation import Federation
from motley.files import write_atomically
from motley.runs.callbacks import Callback
from motley.runs.metrics import to_line
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.settings import flat

T = TypeVar("T")

#: The experiment (MLflow) or project (W&B) of runs, unless an environment variable names another.
DEFAULT_PROJECT = "motley"
#: MLflow accepts at most 100 parameters and 1000 metrics per request.
PER_REQUEST = 100
#: MLflow rejects longer values of parameters. A list of all clients' sizes can be longer.
MLFLOW_VALUE_LENGTH = 500
#: Fields of a line in metrics.jsonl that are not metrics.
NOT_METRICS = ("round", "metric", "clients", "refused", "repeated", "idle")

Ending = Literal["finished", "failed", "interrupted"]


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return all numbers of a round, by names such as `accuracy/small` and `train_loss`.

    Numbers that are not finite and lists, such as the accuracies per class, are left out.
    """
    line = {name: value for name, value in to_line(record).items() if name not in NOT_METRICS}
    # The names of these already say which stage or method reported them.
    numbers = dict(line.pop("metrics", {}))
    # The metrics of a task that is no classification: name -> size -> value.
    line |= line.pop("scores", {})
    for name, value in flat(line).items():
        numbers[name.replace(".", "/", 1)] = value
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


class LoggedRun:
    """The file in the run's folder that says which run of the logger belongs to it.

    It has the id, so that resuming continues the same run, and the last round that was logged:
    rounds after the checkpoint are run again, and must not be logged again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""
        self.last_round = 0

    def read(self) -> None:
        """Read the file, if there is one that can be read."""
        try:
            content = json.loads(self.path.read_text())
            self.id, self.last_round = str(content["id"]), int(content["round"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MotleyError(f"{self.path} cannot be read: {error}.") from None

    def write(self) -> None:
        """Replace the file."""
        content = json.dumps({"id": self.id, "round": self.last_round})
        write_atomically(self.path, content.encode())


class RemoteLogger(Callback):
    """The events that both loggers have in common."""

    #: The setting that turns the logger on.
    setting = ""

    def __init__(self, path: Path) -> None:
        """`path` is the file that remembers the logger's run."""
        self.logged = LoggedRun(path)
        self.ending: Ending = "interrupted"

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.rounds = federation.config.training.rounds
        self.logged.read()
        self.open(federation.config)
        self.logged.write()

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if record.round_number <= self.logged.last_round:
            return
        self.log(record.round_number, numbers_of(record))
        self.logged.last_round = record.round_number
        self.logged.write()

    def on_exception(self, error: BaseException) -> None:
        self.ending = "failed" if isinstance(error, Exception) else "interrupted"

    def on_stop(self, server: ServerState) -> None:
        self.close("finished" if server.round_number == self.rounds else self.ending)

    def open(self, config: Config) -> None:
        """Create the logger's run, or continue the one whose id is known."""
        raise NotImplementedError

    def log(self, round_number: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        raise NotImplementedError

    def close(self, ending: Ending) -> None:
        """End the logger's run."""
        raise NotImplementedError


class WriteMLflow(RemoteLogger):
    """Logs to an MLflow tracking server or database.

    `uri` is the tracking URI. By default it is $MLFLOW_TRACKING_URI or, if that is not set, a
    SQLite database beside the run's folder: MLflow no longer writes its file-based stores. The
    experiment is $MLFLOW_EXPERIMENT_NAME or "motley".
    """

    setting = "run.mlflow"

    def __init__(self, folder: Path, uri: str = "") -> None:
        super().__init__(folder / "mlflow.json")
        database = folder.resolve().parent / "mlflow.db"
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
        self.name = folder.resolve().name

    def open(self, config: Config) -> None:
        require("mlflow", self.setting)
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        # The client is used without `mlflow.start_run`, whose current run is state of the process.
        with _quiet("mlflow", "alembic"):
            self.client: Any = MlflowClient(tracking_uri=self.uri)
            experiment = self._experiment()
        if self.logged.id:
            try:
                self.client.update_run(self.logged.id, status="RUNNING")
                return
            except MlflowException:
                pass  # it was deleted there, or the database is a new one
        self.logged.id = self.client.create_run(experiment, run_name=self.name).info.run_id
        self.logged.last_round = 0
        parameters = []
        for name, value in flat(config.model_dump(mode="json")).items():
            parameters.append(Param(name, str(value)[:MLFLOW_VALUE_LENGTH]))
        for some in _chunks(parameters, PER_REQUEST):
            self.client.log_batch(self.logged.id, params=some)

    def _experiment(self) -> str:
        """Return the id of the experiment. It is created if there is none of its name."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self.client.create_experiment(name))

    def log(self, round_number: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = []
        for name, value in numbers.items():
            allowed_name = re.sub(r"[^\w./ :-]", "_", name)
            metrics.append(Metric(allowed_name, float(value), now, round_number))
        for some in _chunks(metrics, PER_REQUEST):
            self.client.log_batch(self.logged.id, metrics=some)

    def close(self, ending: Ending) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[ending]
        self.client.set_terminated(self.logged.id, status)


class WriteWandb(RemoteLogger):
    """Logs to Weights & Biases, or with mode "offline" to files for `wandb sync`.

    The files are in `wandb/` in the run's folder. The project is $WANDB_PROJECT or "motley".
    """

    setting = "run.wandb"

    def __init__(self, folder: Path, mode: Literal["offline", "online"]) -> None:
        super().__init__(folder / "wandb.json")
        self.folder, self.mode = folder.resolve(), mode

    def open(self, config: Config) -> None:
        require("wandb", self.setting)
        import wandb

        self.logged.id = self.logged.id or uuid.uuid4().hex[:12]
        # Without these settings, W&B prints to the terminal, copies its output and reads the
        # user's git repository.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=self.folder.name,
            id=self.logged.id,
            resume="allow",
            mode=self.mode,
            dir=self.folder,
            config=flat(config.model_dump(mode="json")),
            settings=settings,
        )
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")

    def log(self, round_number: int, numbers: Mapping[str, float]) -> None:
        # W&B's own step must only grow, also when a run is resumed. The round is a metric, which
        # `define_metric` makes the horizontal axis.
        self.run.log({"round": round_number, **numbers})

    def close(self, ending: Ending) -> None:
        self.run.finish(exit_code=0 if ending == "finished" else 1)


class Guarded(Callback):
    """Turns a logger off, with one warning, when it raises an exception."""

    def __init__(self, logger: RemoteLogger) -> None:
        self.logger = logger
        self.active = True
        self._round = 0

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self._round = server.round_number
        self._guard(lambda: self.logger.on_start(federation, server))

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        self._round = record.round_number
        self._guard(lambda: self.logger.on_round(server, record))

    def on_exception(self, error: BaseException) -> None:
        self._guard(lambda: self.logger.on_exception(error))

    def on_stop(self, server: ServerState) -> None:
        self._guard(lambda: self.logger.on_stop(server))

    def _guard(self, event: Callable[[], None]) -> None:
        if not self.active:
            return
        try:
            event()
        except Exception as error:
            self.active = False
            reason, _, _ = str(error).partition("\n")
            warnings.warn(
                f"{self.logger.setting}: logging stopped in round {self._round}: "
                f"{type(error).__name__}: {reason} The run goes on, and metrics.jsonl has every "
                "round.",
                stacklevel=2,
            )


def build_loggers(folder: Path, config: Config) -> list[Callback]:
    """Return the loggers that a configuration asks for."""
    loggers: list[Callback] = []
    if config.run.mlflow:
        uri = config.run.mlflow if isinstance(config.run.mlflow, str) else ""
        loggers.append(Guarded(WriteMLflow(folder, uri)))
    if config.run.wandb != "off":
        loggers.append(Guarded(WriteWandb(folder, config.run.wandb)))
    return loggers


def require_loggers(config: Config) -> None:
    """Raise if the library of a logger that the configuration asks for is not installed."""
    if config.run.mlflow:
        require("mlflow", WriteMLflow.setting)
    if config.run.wandb != "off":
        require("wandb", WriteWandb.setting)


def _chunks(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), length):
        yield items[start : start + length]


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence the informational messages of libraries while the block runs."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
