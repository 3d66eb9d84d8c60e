"""How good the global model is: every size on the whole test set, and what a run's accuracies come to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.data.device import DeviceData
from motley.engine.device import place
from motley.engine.weights import lower, working_type
from motley.models.layers import use_fused
from motley.settings import Settings
from motley.splits.base import Split
from motley.splits.part import State, by_type, take
from motley.transfer import Later


class EvaluationSettings(Settings):
    """When and how the global model is evaluated."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations. The last round is always evaluated."""
    batch_size: int = Field(default=1000, ge=1)
    """Batch size of the evaluation."""
    last_k: int = Field(default=5, ge=1)
    """Number of last evaluations that the reported mean of the last accuracies is over."""
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()
    """Accuracies between 0 and 1. For each, the first round that reaches it is reported."""


@dataclass(frozen=True)
class Score:
    """One size on the test set."""

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]


IN_THE_PLACE_OF = {"fp16": "bf16"}
"""Precisions that evaluation does not use. No batch normalises itself there: with statistics averaged over unlike
clients, activations may be larger than float16 allows.
"""
PREPARED_BYTES = 2**28
"""Most memory for test images that are made once and kept."""


class Evaluator:
    """Evaluates every size; on a GPU each on its own stream, as one captured graph."""

    def __init__(
        self,
        split: Split,
        data: DeviceData,
        classes: int,
        settings: EvaluationSettings,
        precision: str,
        fused: bool = False,
    ) -> None:
        precision = IN_THE_PLACE_OF.get(precision, precision)
        batches = TestBatches(data, settings.batch_size, working_type(precision))
        self._seen: list[int] = torch.bincount(data.labels, minlength=classes).tolist()
        self._split = split
        self._sizes = {size: _Size(split, size, batches, classes, precision, fused) for size in split.sizes}

    def __call__(self, state: Mapping[str, Tensor], round_number: int = 0) -> dict[str, Score]:
        """Return every size's score with its part of the state after a round."""
        return self.start(state, round_number).scores()

    def start(self, state: Mapping[str, Tensor], round_number: int) -> Evaluation:
        """Begin to evaluate every size. On a GPU the host goes on, and the state may be dropped or trained from."""
        counts = {
            name: size.start(take(state, self._split.evaluated(name, round_number)))
            for name, size in self._sizes.items()
        }
        return Evaluation(counts, self._seen)


class Evaluation:
    """An evaluation that the device may still be at."""

    def __init__(self, counts: dict[str, Later], seen: list[int]) -> None:
        self._counts, self._seen = counts, seen

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return all(counts.ready for counts in self._counts.values())

    def scores(self) -> dict[str, Score]:
        """Return every size's score, once the device is done."""
        return {size: _score(counts.read(), self._seen) for size, counts in self._counts.items()}


def _score(counts: list[float], seen: list[int]) -> Score:
    *right, loss = counts
    by_class = tuple(r / max(s, 1) for r, s in zip(right, seen, strict=True))
    return Score(sum(right) / sum(seen), loss / sum(seen), by_class)


class TestBatches:
    """The test set in batches, made once where they are not too large."""

    __test__ = False

    def __init__(self, data: DeviceData, batch_size: int, dtype: torch.dtype) -> None:
        self.data, self.dtype = data, dtype
        self._rows = torch.arange(len(data), device=data.device).split(batch_size)
        fits = len(data) * math.prod(data.shape) * dtype.itemsize <= PREPARED_BYTES
        self._made = [self._make(rows) for rows in self._rows] if fits else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._made) if self._made is not None else (self._make(rows) for rows in self._rows)

    def _make(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.data.batch(rows)
        return images.to(self.dtype), labels


class _Size:
    """A model that stays, into which a state is copied to be evaluated."""

    def __init__(
        self, split: Split, size: str, batches: TestBatches, classes: int, precision: str, fused: bool
    ) -> None:
        self.batches, self.device = batches, batches.data.device
        self.model = place(split.build(size), self.device).eval()
        lower(self.model, precision)
        if fused and self.device.type == "cuda":
            use_fused(self.model)
        self._tensors = self.model.state_dict()
        self._into = by_type(self._tensors.values())
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counts = torch.zeros(classes + 1, dtype=torch.float64, device=self.device)
        """Right answers a class, and the summed loss."""

    def start(self, own: State) -> Later:
        """Evaluate a client's state without waiting for the device."""
        if self.stream is None:
            self._copy(own)
            self._count()
            return Later(self._counts.clone())
        server = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(server)
        with torch.cuda.stream(self.stream):
            self._copy(own)
            server.wait_event(self.stream.record_event())
            if self._graph is None:
                self._count()
                torch.cuda.synchronize(self.device)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self.stream):
                    self._count()
            self._graph.replay()
            return Later(self._counts)

    @torch.no_grad()
    def _copy(self, own: State) -> None:
        for into, values in zip(self._into, by_type(own[name] for name in self._tensors), strict=True):
            if into:
                torch._foreach_copy_(into, values)

    @torch.no_grad()
    def _count(self) -> None:
        """Count right answers a class and sum the loss over the whole test set."""
        self._counts.zero_()
        right, loss = self._counts[:-1], self._counts[-1]
        for images, labels in self.batches:
            answers = self.model(images).float()
            loss += F.cross_entropy(answers, labels, reduction="sum")
            right.index_add_(0, labels, (answers.argmax(1) == labels).double())


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
