"""Predictions for raw inputs, with a model of a run or with an exported file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.export.formats import Runner
from motley.export.inputs import InputFormat
from motley.export.rows import RowReader
from motley.splits.early_exit import ExitOutputs, exits_of, stop_early

#: Inputs are computed in batches of at most this many.
BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """The prediction for one input."""

    #: The most probable classes (or next tokens) and their probabilities, the best first. Empty for
    #: other tasks.
    classes: tuple[tuple[str, float], ...]
    #: The model's outputs: logits, or the numbers of a regression.
    outputs: tuple[float, ...]
    #: The exit that the prediction comes from, counted from 1; None if examples do not leave early.
    exit: int | None = None


@dataclass(frozen=True)
class Predictor:
    """Computes outputs and predictions for inputs as the data set stores them.

    `run` is the model, or a function that runs an exported file. `takes_stored` says that it
    normalizes images itself.
    """

    run: Runner | nn.Module
    inputs: InputFormat
    task: str
    class_names: Sequence[str]
    takes_stored: bool = False
    #: Reads the user's own tables and texts, if the run's data set came from such files.
    rows: RowReader | None = None
    #: The model normalizes with its batch, so predictions need several inputs at once.
    by_batch: bool = False

    @torch.no_grad()
    def outputs(self, stored: np.ndarray, batch_size: int = BATCH) -> Tensor:
        """Return the outputs for inputs of shape (N, ...), as the data set stores them."""
        batches = []
        for start in range(0, len(stored), batch_size):
            batches.append(self._forward(stored[start : start + batch_size]))
        return torch.cat(batches)

    def _forward(self, stored: np.ndarray) -> Tensor:
        if not self.takes_stored:
            return self.run(self.inputs.prepare(stored))
        if str(stored.dtype) != self.inputs.dtype:
            raise MotleyError(
                f"the exported file takes {self.inputs.dtype} pixels, not {stored.dtype}."
            )
        return self.run(torch.from_numpy(stored))

    @torch.no_grad()
    def stop_early(self, stored: np.ndarray, threshold: float) -> ExitOutputs:
        """Like `outputs`, but each input leaves at the first exit that is confident enough."""
        if not isinstance(self.run, nn.Module):
            raise MotleyError(
                "--exit-threshold: an exported program always computes the whole network. Use a "
                "run, or a model that was exported with --format safetensors."
            )
        model = exits_of(self.run, "--exit-threshold")
        logits, exits = [], []
        for start in range(0, len(stored), BATCH):
            inputs = self.inputs.prepare(stored[start : start + BATCH])
            outputs = stop_early(model, inputs, threshold)
            logits.append(outputs.logits)
            exits.append(outputs.exits)
        return ExitOutputs(torch.cat(logits), torch.cat(exits))

    def predict(
        self, array: np.ndarray, top: int = 1, exit_threshold: float | None = None
    ) -> list[Prediction]:
        """Return a prediction for each input of an array of one or several inputs.

        Images are (height, width, channels), in bytes or in 0 to 1, and not normalized.
        """
        stored = self.inputs.read_array(np.asarray(array), "inputs")
        return self.predict_stored(stored, top, exit_threshold)

    def predict_stored(
        self, stored: np.ndarray, top: int = 1, exit_threshold: float | None = None
    ) -> list[Prediction]:
        """Return a prediction for each input that `InputFormat.read_array` has checked."""
        if not isinstance(top, Integral) or top < 1:
            raise MotleyError(f"top = {top!r}: should be a whole number, 1 or more.")
        if self.by_batch and len(stored) < 2:
            raise MotleyError(
                "the model normalizes with the statistics of its batch "
                "(split.normalization_statistics = 'batch'), so it cannot predict for one input "
                "alone. Give several inputs of different classes together."
            )
        if exit_threshold is None:
            # Batches of about the same size: the last one might have a single input otherwise.
            batches = max(1, math.ceil(len(stored) / BATCH))
            outputs = self.outputs(stored, math.ceil(len(stored) / batches))
            return [self._prediction(row, top, None) for row in outputs]
        early = self.stop_early(stored, exit_threshold)
        predictions = []
        for logits, number in zip(early.logits, early.exits.tolist(), strict=True):
            predictions.append(self._prediction(logits, top, number + 1))
        return predictions

    def _prediction(self, outputs: Tensor, top: int, exit_number: int | None) -> Prediction:
        values = tuple(outputs.flatten().tolist())
        if self.task == "regression":
            return Prediction((), values, exit_number)
        if outputs.ndim > 1:
            outputs = outputs[-1]  # the token after the whole sequence
        probabilities, numbers = outputs.float().softmax(-1).topk(min(top, outputs.shape[-1]))
        classes = []
        for number, probability in zip(numbers.tolist(), probabilities.tolist(), strict=True):
            classes.append((self._name(number), probability))
        return Prediction(tuple(classes), values, exit_number)

    def _name(self, number: int) -> str:
        return self.class_names[number] if number < len(self.class_names) else str(number)
