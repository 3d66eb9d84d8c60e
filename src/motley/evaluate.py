"""Accuracy of the global model: every size on the whole test set, and summaries over a run.

Evaluation is in single precision whatever the training precision (on a GPU, tf32 unless
`engine.precision` is fp32). In 16 bits, the rounding of the weights shifts the mean of a channel by
up to 0.4 % of its value. If the channel's running variance is small, that is many standard
deviations, and normalization with running statistics does not remove the shift: on one checkpoint
after 500 rounds it cost ten points of accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Protocol

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
from motley.methods.evaluation import CORRECT, LOSS, SEEN
from motley.models.inputs import dims_of
from motley.settings import Settings
from motley.splits.base import Split


class EvaluationSettings(Settings):
    """When and how the global model, or clients' own models, are evaluated."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations. The last round is always evaluated."""
    batch_size: int = Field(default=1000, ge=1)
    """Batch size of the evaluation."""
    last_k: int = Field(default=5, ge=1)
    """Number of last evaluations that the reported mean of the last accuracies is over."""
    clients: Literal["round", "all"] = "round"
    """Whose own models are evaluated if the method exchanges no weights. round: those of the
    round's clients. all: those of all clients that have trained so far. A size's score is the mean
    over its clients.
    """
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()
    """Accuracies between 0 and 1. For each, the first round that reaches it is reported."""


@dataclass(frozen=True)
class Score:
    """The score of one size on the test set."""

    accuracy: float
    loss: float
    #: Accuracy per class; None for a class that has no test image.
    class_accuracy: tuple[float | None, ...]


#: Test batches are prepared once and kept if they take at most this much memory.
PREPARED_BYTES = 2**28


class Evaluator:
    """Evaluates every size. On a GPU, each size has a stream and a captured CUDA graph.

    Models and test images are allocated in the first evaluation, which calls `data` to put the test
    set on the device.
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
        """Return the score of every size, with its part of the global state after a round."""
        return self.start(state, round_number).scores()

    def start(self, state: Mapping[str, Tensor], round_number: int) -> Evaluation:
        """Start to evaluate every size.

        On a GPU this returns before the device is done. The state has then been copied, in stream
        order, so the caller may overwrite or drop it.
        """
        counts = {}
        for name in self._split.sizes:
            part = self._split.evaluated(name, round_number)
            counts[name] = self._size(name).start(take(state, part))
        return Evaluation(counts, self._seen)

    def _size(self, name: str) -> _Size:
        """Return the evaluator of a size. It is built when the size is first evaluated."""
        if name not in self._sizes:
            model = self._split.build(name)
            self._sizes[name] = _Size(
                model, self.batches, self._classes, self._kernels, self._compiled
            )
        return self._sizes[name]

    @cached_property
    def batches(self) -> TestBatches:
        """The test set on the device, in batches."""
        return TestBatches(self._data(), self._settings.batch_size)

    @cached_property
    def _seen(self) -> list[int]:
        """The number of test images per class."""
        counts: list[int] = torch.bincount(
            self.batches.data.targets, minlength=self._classes
        ).tolist()
        return counts


class PendingScores(Protocol):
    """Scores that a GPU may still be computing."""

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        ...

    def scores(self) -> dict[str, Score]:
        """Wait for the device and return the score of every evaluated size."""
        ...


class Evaluation:
    """The result of an evaluation that may still be running on the device."""

    def __init__(self, counts: dict[str, AsyncCopy], seen: list[int]) -> None:
        self._counts, self._seen = counts, seen

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return all(counts.ready for counts in self._counts.values())

    def scores(self) -> dict[str, Score]:
        """Wait for the device and return the score of every size."""
        return {size: _score(counts.read(), self._seen) for size, counts in self._counts.items()}


class OwnModelScores:
    """The scores of clients' own models: for each size, the mean over its clients.

    `counts` are the sizes of the clients and what each counted on its test set
    (`motley.methods.evaluation`). Clients may have different test sets.
    """

    def __init__(self, counts: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        self._sizes = [size for size, _ in counts]
        rows = []
        for _, values in counts:
            row = [values[CORRECT], values[SEEN], values[LOSS].reshape(1)]
            rows.append(torch.cat(row).double())
        self._rows = AsyncCopy(torch.stack(rows))

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return self._rows.ready

    def scores(self) -> dict[str, Score]:
        """Wait for the device and return the score of every size that some client has."""
        by_size: dict[str, list[Score]] = {}
        for size, (*counts, loss) in zip(self._sizes, self._rows.read(), strict=True):
            classes = len(counts) // 2
            seen = [round(count) for count in counts[classes:]]
            by_size.setdefault(size, []).append(_score([*counts[:classes], loss], seen))
        return {size: mean_score(by_size[size]) for size in by_size}


def mean_score(scores: Sequence[Score]) -> Score:
    """Return the mean of scores; a class counts where it has test images."""
    by_class: list[float | None] = []
    for accuracies in zip(*(score.class_accuracy for score in scores), strict=True):
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        by_class.append(sum(known) / len(known) if known else None)
    accuracy = sum(score.accuracy for score in scores) / len(scores)
    loss = sum(score.loss for score in scores) / len(scores)
    return Score(accuracy, loss, tuple(by_class))


def _score(counts: list[float], seen: list[int]) -> Score:
    *correct, loss = counts
    by_class: list[float | None] = []
    for correct_of_class, images_of_class in zip(correct, seen, strict=True):
        by_class.append(correct_of_class / images_of_class if images_of_class else None)
    return Score(sum(correct) / sum(seen), loss / sum(seen), tuple(by_class))


class TestBatches:
    """The test set in single-precision batches, prepared once if they fit into `PREPARED_BYTES`."""

    __test__ = False

    def __init__(self, data: DeviceData, batch_size: int) -> None:
        self.data, self.size = data, min(batch_size, len(data))
        self._rows = torch.arange(len(data), device=data.device).split(batch_size)
        fits = len(data) * math.prod(dims_of(data.shape)) * torch.float32.itemsize <= PREPARED_BYTES
        self._prepared = [data.batch(rows) for rows in self._rows] if fits else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._prepared is not None:
            return iter(self._prepared)
        return (self.data.batch(rows) for rows in self._rows)


class _Size:
    """The model of one size, which is kept. Each evaluation copies a state into it."""

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
        self._targets = by_type(self._tensors.values())
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        #: Correct predictions per class; the last element is the summed loss.
        self._counts = torch.zeros(classes + 1, dtype=torch.float64, device=self.device)

    def start(self, part: State) -> AsyncCopy:
        """Evaluate this size's part of a state without waiting for the device."""
        if self.stream is None:
            self._copy(part)
            self._count()
            return AsyncCopy(self._counts.clone())
        server = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(server)
        with torch.cuda.stream(self.stream):
            self._copy(part)
            # The server may change its state once it has been copied; it need not wait for more.
            server.wait_event(self.stream.record_event())
            if self._graph is None:
                # A capture needs a warm-up: libraries choose algorithms and allocate workspaces.
                self._count()
                torch.cuda.synchronize(self.device)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self.stream):
                    self._count()
            self._graph.replay()
            return AsyncCopy(self._counts)

    @torch.no_grad()
    def _copy(self, part: State) -> None:
        sources = by_type(part[name] for name in self._tensors)
        for targets, values in zip(self._targets, sources, strict=True):
            if targets:
                torch._foreach_copy_(targets, values)

    @torch.no_grad()
    def _count(self) -> None:
        """Count correct predictions per class and sum the loss over the whole test set."""
        self._counts.zero_()
        correct, loss = self._counts[:-1], self._counts[-1]
        for images, labels in self.batches:
            logits = self._logits(images)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            correct.index_add_(0, labels, (logits.argmax(1) == labels).double())

    def _logits(self, images: Tensor) -> Tensor:
        """Return the model's logits."""
        if not self._compiled:
            return self.model(images)
        # The model is compiled for whole batches only; the last batch may be shorter.
        with compilation() if len(images) == self.batches.size else no_compilation():
            return self.model(images)


@dataclass(frozen=True)
class Summary:
    """The summary of a series of accuracies."""

    last: float
    best: float
    best_round: int
    mean_of_last_k: float


def summarize(rounds: Sequence[int], accuracies: Sequence[float], last_k: int) -> Summary:
    """Return the last and the best accuracy, and the mean of the last k.

    If several rounds have the best accuracy, the earliest counts.
    """
    best = max(accuracies)
    tail = accuracies[-last_k:]
    return Summary(accuracies[-1], best, rounds[accuracies.index(best)], sum(tail) / len(tail))


def rounds_to(target: float, rounds: Sequence[int], accuracies: Sequence[float]) -> int | None:
    """Return the first round at or above a target accuracy, or None if there is none."""
    for number, accuracy in zip(rounds, accuracies, strict=True):
        if accuracy >= target:
            return number
    return None
