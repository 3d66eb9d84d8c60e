"""Accuracy of the global model: every size on the whole test set, and summaries over a run.

Evaluation is in single precision whatever the training precision (on a GPU, tf32 unless
`engine.precision` is fp32). In 16 bits the rounded weights shift the mean of a channel by up to
0.4 % of it. Where such a channel's running variance is small, that is many standard deviations, and
no batch statistics take the shift away: on one checkpoint after 500 rounds it cost ten points of
accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from motley.client.compilation import compilation, compile_model, no_compilation
from motley.client.fused import apply_kernels
from motley.core.async_copy import AsyncCopy
from motley.core.device import place
from motley.core.part import State, by_type, take
from motley.data.device import DeviceData
from motley.settings import Settings
from motley.splits.base import Split


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
    class_accuracy: tuple[float | None, ...]
    """Accuracy per class; None for a class that has no test image."""


PREPARED_BYTES = 2**28
"""Most memory for test images that are made once and kept."""


class Evaluator:
    """Evaluates every size; on a GPU each on its own stream, as one captured graph.

    Models and test images take memory from the first evaluation on. `data` puts the test set on the
    device, and is called then.
    """

    def __init__(
        self,
        split: Split,
        data: Callable[[], DeviceData],
        classes: int,
        settings: EvaluationSettings,
        kernels: Collection[str] = (),
        compiled: bool = False,
    ) -> None:
        self._split, self._data, self._classes = split, data, classes
        self._settings, self._kernels, self._compiled = settings, kernels, compiled
        self._sizes: dict[str, _Size] = {}

    def __call__(self, state: Mapping[str, Tensor], round_number: int = 0) -> dict[str, Score]:
        """Return every size's score with its part of the state after a round."""
        return self.start(state, round_number).scores()

    def start(self, state: Mapping[str, Tensor], round_number: int) -> Evaluation:
        """Begin to evaluate every size.

        On a GPU the host goes on, and the state may be dropped or trained from.
        """
        counts = {}
        for name in self._split.sizes:
            part = self._split.evaluated(name, round_number)
            counts[name] = self._size(name).start(take(state, part))
        return Evaluation(counts, self._seen)

    def _size(self, name: str) -> _Size:
        """Return the model of a size, which is built when it is first evaluated."""
        if name not in self._sizes:
            model = self._split.build(name)
            self._sizes[name] = _Size(
                model, self._batches, self._classes, self._kernels, self._compiled
            )
        return self._sizes[name]

    @cached_property
    def _batches(self) -> TestBatches:
        """The test set on the device, in batches."""
        return TestBatches(self._data(), self._settings.batch_size)

    @cached_property
    def _seen(self) -> list[int]:
        """Test images per class."""
        counts: list[int] = torch.bincount(
            self._batches.data.labels, minlength=self._classes
        ).tolist()
        return counts


class Evaluation:
    """An evaluation that the device may still be at."""

    def __init__(self, counts: dict[str, AsyncCopy], seen: list[int]) -> None:
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
    by_class: list[float | None] = []
    for right_of_class, images_of_class in zip(right, seen, strict=True):
        by_class.append(right_of_class / images_of_class if images_of_class else None)
    return Score(sum(right) / sum(seen), loss / sum(seen), tuple(by_class))


class TestBatches:
    """The test set in single-precision batches, prepared once if they fit into `PREPARED_BYTES`."""

    __test__ = False

    def __init__(self, data: DeviceData, batch_size: int) -> None:
        self.data, self.size = data, min(batch_size, len(data))
        self._rows = torch.arange(len(data), device=data.device).split(batch_size)
        fits = len(data) * math.prod(data.shape) * torch.float32.itemsize <= PREPARED_BYTES
        self._prepared = [data.batch(rows) for rows in self._rows] if fits else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._prepared is not None:
            return iter(self._prepared)
        return (self.data.batch(rows) for rows in self._rows)


class _Size:
    """A model that stays, into which a state is copied to be evaluated."""

    def __init__(
        self,
        model: nn.Module,
        batches: TestBatches,
        classes: int,
        kernels: Collection[str],
        compiled: bool,
    ) -> None:
        self.batches, self.device = batches, batches.data.device
        self.model = place(model, self.device).eval()
        if self.device.type == "cuda":
            self.model = apply_kernels(self.model, kernels)
        self._compiled = compiled
        if compiled:
            compile_model(self.model)
        self._tensors = self.model.state_dict()
        self._into = by_type(self._tensors.values())
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        #: Correct predictions per class; the last place holds the summed loss.
        self._counts = torch.zeros(classes + 1, dtype=torch.float64, device=self.device)

    def start(self, own: State) -> AsyncCopy:
        """Evaluate a client's state without waiting for the device."""
        if self.stream is None:
            self._copy(own)
            self._count()
            return AsyncCopy(self._counts.clone())
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
            return AsyncCopy(self._counts)

    @torch.no_grad()
    def _copy(self, own: State) -> None:
        for into, values in zip(
            self._into, by_type(own[name] for name in self._tensors), strict=True
        ):
            if into:
                torch._foreach_copy_(into, values)

    @torch.no_grad()
    def _count(self) -> None:
        """Count correct predictions per class and sum the loss over the whole test set."""
        self._counts.zero_()
        right, loss = self._counts[:-1], self._counts[-1]
        for images, labels in self.batches:
            logits = self._logits(images)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            right.index_add_(0, labels, (logits.argmax(1) == labels).double())

    def _logits(self, images: Tensor) -> Tensor:
        """Run the model. It may be compiled for whole batches, and the last batch may be shorter."""
        if not self._compiled:
            return self.model(images)
        with compilation() if len(images) == self.batches.size else no_compilation():
            return self.model(images)


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
    return next(
        (number for number, accuracy in zip(rounds, accuracies, strict=True) if accuracy >= target),
        None,
    )
