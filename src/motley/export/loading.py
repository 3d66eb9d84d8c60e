"""Load the trained models of a run, or an exported model.

run = motley.load("runs/mine")
model = run.model("small")                  # an ordinary nn.Module
run.predict(images, "small", top=3)

motley.load("runs/mine/export/small-onnx").predict(images)
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from motley.assembly import build_split, load_dataset_of
from motley.config import Config
from motley.core.errors import MotleyError, unknown
from motley.data import Dataset
from motley.data.files.reading import Reading, read_files
from motley.data.settings import FILES
from motley.export.card import CARD, Card, read_card
from motley.export.formats import open_program, open_runner
from motley.export.inputs import InputFormat
from motley.export.predict import Prediction, Predictor
from motley.export.rows import RowReader
from motley.federation import Federation
from motley.files import given_path, read_json_object
from motley.methods import METHODS
from motley.models.moments import normalizes_by_batch
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.integrity import trained_on
from motley.runs.metrics import MetricsLog, scores_of
from motley.server.state import ServerState
from motley.splits import Split
from motley.splits.trained import at_full_width, trained_model
from motley.tasks import Task


def load(path: str | Path, checkpoint: int | None = None) -> LoadedRun | LoadedExport:
    """Load the trained models of a run, or a model that `motley export` wrote.

    `checkpoint` is the round of one of the run's checkpoints; by default it is the newest.
    """
    path = given_path(path, "load: path")
    if (path / CARD).exists():
        if checkpoint is not None:
            raise MotleyError(f"{path} is an exported model, which has no checkpoints.")
        return LoadedExport(path)
    return LoadedRun(path, checkpoint)


class LoadedRun:
    """The trained models of a run. Nothing in the run's folder is changed."""

    def __init__(self, path: Path, checkpoint: int | None = None) -> None:
        self.path = path
        self.folder = RunFolder.open(path)
        self.config: Config = self.folder.read_config()
        self.server: ServerState = read_checkpoint(self._checkpoint(checkpoint))

    def _checkpoint(self, wanted: int | None) -> Path:
        saved = checkpoints(self.folder.checkpoints)
        if not saved:
            raise MotleyError(f"{self.path} has no checkpoint yet.")
        if wanted is None:
            return saved[-1]
        rounds = {int(folder.name.removeprefix("round-")): folder for folder in saved}
        if wanted not in rounds:
            known = ", ".join(map(str, rounds))
            raise MotleyError(
                f"checkpoint {wanted}: {self.path} has checkpoints of the rounds {known}."
            )
        return rounds[wanted]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of the sizes."""
        return self.config.split.sizes(self.config.model.sizes)

    @cached_property
    def _reading(self) -> Reading | None:
        """The user's own files, if the data set came from such files."""
        data = self.config.data
        if data.name != FILES or data.file_path is None or data.files is None:
            return None
        return read_files(data.file_path, data.files)

    @cached_property
    def dataset(self) -> Dataset:
        """The run's data set. The shapes of the models depend on it."""
        if self._reading is None:
            return load_dataset_of(self.config)
        return self.config.data.limited(self._reading.dataset)

    @cached_property
    def rows(self) -> RowReader | None:
        """Reads further rows of the user's own tables and texts.

        Their columns and characters are numbered by the training rows, so these must still be the
        ones that the run was trained on.
        """
        data = self.config.data
        if self._reading is None or data.files is None:
            return None
        reader = RowReader.of(self._reading, data.files)
        depends_on_rows = reader.encoder is not None or bool(reader.vocabulary)
        if depends_on_rows and not trained_on(self.folder, self.dataset.train):
            raise MotleyError(
                f"{data.path}: has changed since {self.path} was trained on it. Means, categories "
                "and characters of the changed file may have other numbers than the model "
                "learned. Put the earlier file back."
            )
        return reader

    @cached_property
    def task(self) -> Task:
        """The task, with the run's metrics."""
        return self.config.task.build(self.dataset.task)

    @cached_property
    def inputs(self) -> InputFormat:
        """The format of the inputs."""
        return InputFormat.of(self.dataset.train, self.config.data.transform)

    @cached_property
    def split(self) -> Split:
        """The sizes and their parts of the global state."""
        return build_split(self.config, self.inputs.model_shape, self.dataset.classes)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes; their numbers if the data set has no names."""
        if self.rows is not None and self.rows.vocabulary:
            return ["unknown", *map(repr, self.rows.vocabulary)]
        return list(self.dataset.class_names or map(str, range(self.dataset.classes)))

    def model(self, size: str) -> nn.Module:
        """Return the trained model of a size, as it is evaluated: an ordinary module on the CPU."""
        if size not in self.sizes:
            raise MotleyError(unknown("size", size, self.sizes))
        self._refuse_clients_models()
        try:
            return trained_model(self.split, self.server.model, size, self.server.round_number)
        except (KeyError, RuntimeError) as error:
            raise MotleyError(
                f"{self.path}: {self.folder.config.name} describes a different model than the "
                f"checkpoint of round {self.server.round_number}: {error}"
            ) from None

    def _refuse_clients_models(self) -> None:
        """Raise if there is no global model."""
        method, private = self.config.method.name, self.config.split.private
        reason = ""
        if not METHODS[method].requirements.exchanges_weights:
            reason = f"method.name = {method!r} exchanges no weights"
        elif private:
            reason = f"split.private = {list(private)}: clients keep a part of their models"
        if reason:
            raise MotleyError(
                f"{self.path}: {reason}, so there is no global model. Choose the model of a "
                "client, with --client or client_model."
            )

    def client_model(self, client: int) -> tuple[str, nn.Module]:
        """Return a client's own model and its size, if the method gives clients such models.

        The federation is built for it, with a copy of the clients' states.
        """
        count = self.config.federation.clients
        if client not in range(count):
            raise MotleyError(f"--client {client}: the clients have the numbers 0 to {count - 1}.")
        with tempfile.TemporaryDirectory() as temporary:
            states = Path(temporary) / "clients"
            if self.folder.clients.exists():
                shutil.copytree(self.folder.clients, states)
            federation = Federation(self.config, dataset=self.dataset, client_state_folder=states)
            model = federation.client_model(federation.to_device(self.server), client)
            size = federation.size_of(client, self.server.round_number)
        return size, at_full_width(model).to("cpu")

    @lru_cache(maxsize=8)  # noqa: B019  (a loaded run lives as long as its models)
    def predictor(self, size: str = "", client: int | None = None) -> Predictor:
        """Return an object that predicts with the model of a size, or with a client's own."""
        model = self.model(size) if client is None else self.client_model(client)[1]
        return Predictor(
            model,
            self.inputs,
            self.task.name,
            self.class_names,
            rows=self.rows,
            by_batch=normalizes_by_batch(model),
        )

    def predict(
        self,
        array: np.ndarray,
        size: str = "",
        top: int = 1,
        exit_threshold: float | None = None,
        client: int | None = None,
    ) -> list[Prediction]:
        """Return a prediction for each input of an array, as the data set stores inputs.

        The model is a size's global model, or a client's own.
        """
        return self.predictor(size, client).predict(array, top, exit_threshold)

    def recorded(self, size: str) -> float | None:
        """Return the score of a size that the run recorded in the checkpoint's round, if any."""
        for line in MetricsLog(self.folder.metrics).read():
            if line["round"] == self.server.round_number:
                return scores_of(line).get(size)
        return None

    def environment(self) -> dict[str, Any]:
        """Return the content of environment.json; an empty mapping if it cannot be read."""
        return read_json_object(self.folder.environment)


class LoadedExport:
    """A model that `motley export` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.card: Card = read_card(path)
        self.file = path / self.card.file
        if not self.file.exists():
            raise MotleyError(f"{path}: there is no {self.card.file} in it.")

    @property
    def sizes(self) -> tuple[str, ...]:
        """The name of the one size."""
        return (self.card.size,)

    def model(self, size: str = "") -> nn.Module:
        """Return the model. Formats "safetensors" and "torch" can be loaded into torch."""
        self._check_size(size)
        if self.card.format == "torch":
            return open_program(self.file)
        if self.card.format == "onnx":
            raise MotleyError(f"{self.file}: cannot be loaded into torch; onnxruntime runs it.")
        inputs = self.card.inputs()
        split = build_split(self.card.read_config(), inputs.model_shape, self.card.outputs)
        model = at_full_width(split.build(self.card.size))
        try:
            model.load_state_dict(load_file(self.file))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise MotleyError(f"{self.file}: cannot be loaded: {error}") from None
        return model.eval()

    def _check_size(self, size: str) -> None:
        if size not in ("", self.card.size):
            raise MotleyError(unknown("size", size, self.sizes))

    @lru_cache(maxsize=1)  # noqa: B019
    def predictor(self, size: str = "") -> Predictor:
        """Return an object that predicts with the exported file."""
        self._check_size(size)
        card = self.card
        is_weights = card.format == "safetensors"
        run = self.model() if is_weights else open_runner(card.format, self.file)
        return Predictor(
            run,
            card.inputs(),
            card.task,
            card.class_names,
            card.with_normalization,
            card.row_reader(),
            card.by_batch,
        )

    def predict(
        self,
        array: np.ndarray,
        size: str = "",
        top: int = 1,
        exit_threshold: float | None = None,
    ) -> list[Prediction]:
        """Return a prediction for each input of an array, as the data set stores inputs."""
        return self.predictor(size).predict(array, top, exit_threshold)
