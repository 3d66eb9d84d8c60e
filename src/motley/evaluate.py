"""How good the global model is: every size on the whole test set, and what a run's accuracies come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from motley.data.device import DeviceData
from motley.engine.device import place
from motley.settings import Settings
from motley.splits.base import Split
from motley.splits.part import take


class EvaluationSettings(Settings):
    """When and how the global model is evaluated."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=1000, ge=1)
    last_k: int = Field(default=5, ge=1)
    """How many of the last evaluations the mean-of-last-k is over."""
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()
    """Accuracies, between 0 and 1, whose first round is reported."""


@dataclass(frozen=True)
class Score:
    """One size on the test set."""

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]


class Evaluator:
    """A model a size, kept, into which states are copied to be evaluated."""

    def __init__(
        self, split: Split, data: DeviceData, classes: int, settings: EvaluationSettings, precision: str
    ) -> None:
        self.split, self.data, self.classes, self.settings = split, data, classes, settings
        self.precision = precision
        self._models: dict[str, nn.Module] = {}

    def __call__(self, state: Mapping[str, Tensor]) -> dict[str, Score]:
        """Return every size's score with its part of a state."""
        counts = {size: self._count(size, state) for size in self.split.sizes}
        return {size: self._score(*count) for size, count in counts.items()}

    def _model(self, size: str) -> nn.Module:
        if size not in self._models:
            self._models[size] = place(self.split.build(size), self.data.device).eval()
        return self._models[size]

    @torch.no_grad()
    def _count(self, size: str, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return examples and correct answers a class, and the summed loss, without waiting for the device."""
        model = self._model(size)
        part = take(state, self.split.part(size))
        for name, tensor in model.state_dict().items():
            tensor.copy_(part[name])
        seen = torch.bincount(self.data.labels, minlength=self.classes)
        right = torch.zeros_like(seen)
        loss = torch.zeros((), device=self.data.device)
        rows = torch.arange(len(self.data), device=self.data.device)
        for chunk in rows.split(self.settings.batch_size):
            images, labels = self.data.batch(chunk)
            with torch.autocast(self.data.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
                answers = model(images).float()
            loss += F.cross_entropy(answers, labels, reduction="sum")
            right.index_add_(0, labels, (answers.argmax(1) == labels).to(right.dtype))
        return seen, right, loss

    def _score(self, seen: Tensor, right: Tensor, loss: Tensor) -> Score:
        total = int(seen.sum())
        by_class = (right / seen.clamp(min=1)).tolist()
        return Score(int(right.sum()) / total, float(loss) / total, tuple(by_class))


@dataclass(frozen=True)
class Summary:
    """What a series of accuracies comes to."""

    last: float
    best: float
    best_round: int
    mean_of_last_k: float


def summarize(rounds: Sequence[int], accuracies: Sequence[float], last_k: int) -> Summary:
    """Return last, best (the earliest of equals) and mean of the last k accuracies."""
    best = max(accuracies)
    tail = accuracies[-last_k:]
    return Summary(accuracies[-1], best, rounds[accuracies.index(best)], sum(tail) / len(tail))


def rounds_to(target: float, rounds: Sequence[int], accuracies: Sequence[float]) -> int | None:
    """Return the first round at or above a target accuracy, or None where there was none."""
    return next((number for number, accuracy in zip(rounds, accuracies, strict=True) if accuracy >= target), None)
