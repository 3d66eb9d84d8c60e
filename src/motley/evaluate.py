"""Scores of the global model: every size on the whole test set, and summaries over a run.

Evaluation is in single precision whatever the training precision (on a GPU, tf32 unless
`engine.precision` is fp32). In 16 bits, the rounding of the weights shifts the mean of a channel by
up to 0.4 % of its value. If the channel's running variance is small, that is many standard
deviations, and normalization with running statistics does not remove the shift: on one checkpoint
after 500 rounds it cost ten points of accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from motley.client.compilation import compilation, compile_model, no_compilation
from motley.client.fused import apply_kernels
from motley.core.async_copy import AsyncCopy
from motley.core.device import place
from motley.core.graphs import capture
from motley.core.part import State, by_type, take
from motley.data.device import DeviceData
from motley.engine.workers import (
    KEPT_BYTES,
    BackgroundTasks,
    Result,
    WorkerPool,
    WorkerTask,
    available_cores,
    is_worthwhile_in_background,
)
from motley.kernels.compiling import compiling_ahead
from motley.methods.evaluation import TestSums, as_vector, totals
from motley.models.inputs import dims_of
from motley.settings import Settings
from motley.splits.base import Split
from motley.tasks import ACCURACY, CLASSIFICATION, MetricInfo, Task


class EvaluationSettings(Settings):
    """When and how the global model, or clients' own models, are evaluated."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations. The last round is always evaluated."""
    batch_size: int = Field(default=1000, ge=1)
    """Batch size of the evaluation."""
    last_k: int = Field(default=5, ge=1)
    """Number of last evaluations that the reported mean of the last scores is over."""
    clients: Literal["round", "all"] = "round"
    """Whose own models are evaluated if clients have some (no weights are exchanged, a personal
    model, or split.private). round: the models of the round's clients. all: of all clients that
    have trained so far. A size's score is the mean over its clients.
    """
    targets: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Values of the task's first metric, such as accuracies between 0 and 1. For each, the first
    round that reaches it is reported.
    """
    per_client: Literal["off", "round", "all"] = "off"
    """Score clients on test examples of their own, beside the global score (docs/evaluation.md).
    round: the clients of the round. all: all clients; if they have models of their own, all that
    have trained. A client's test examples are its own examples in the test set, or held-out ones
    (client_test_fraction).
    """
    per_client_every: int = Field(default=1, ge=1)
    """Evaluations between two scorings of the clients. The last round is always scored."""
    client_test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each client's training examples that is held out for its own score, with the
    client's proportions of classes, and at least one example. Nobody trains on them. A client with
    a single example holds out none. 0: hold out nothing.
    """
    personalize_epochs: float = Field(default=0.0, ge=0)
    """Epochs of local training after which clients are scored a second time: the personalized
    score. The training starts from the evaluated global model, and its result is dropped. Models of
    clients' own are personal already: their personalized score is their score. 0: none.
    """

    def scores_clients(self, round_number: int, rounds: int) -> bool:
        """Tell whether clients are scored after a round, given the number of rounds of the run."""
        if self.per_client == "off":
            return False
        between = self.every * self.per_client_every
        return round_number % between == 0 or round_number == rounds


@dataclass(frozen=True)
class Score:
    """The score of one size on the test set."""

    #: The task's primary metric.
    value: float
    loss: float
    #: Accuracy per class; None for a class that has no test example. Empty without classes.
    class_accuracy: tuple[float | None, ...] = ()
    #: The metric that `value` is.
    metric: MetricInfo = ACCURACY
    #: The task's other metrics, by name.
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The accuracy, for tasks that have one."""
        return self.metrics.get(ACCURACY.name)

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name, the primary one first."""
        return {self.metric.name: self.value, **self.others}

    @classmethod
    def of(cls, task: Task, classes: int, vector: Sequence[float]) -> Score:
        """Return the score for the sums over a test set (`motley.methods.evaluation`)."""
        metrics, loss, class_accuracy = totals(task, classes, vector)
        value = metrics.pop(task.metric)
        return cls(value, loss, class_accuracy, task.primary, metrics)


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
        task: Task = CLASSIFICATION,
        workers: WorkerPool | None = None,
    ) -> None:
        """`workers`: processes that evaluate sizes while the next round trains, on a CPU."""
        self._split, self._data, self._classes, self._task = split, data, classes, task
        self._settings, self._kernels, self._compiled = settings, kernels, compiled
        self._workers = workers
        if workers is not None:
            # All workers share the test set, so it must be there before they are forked.
            workers.register("evaluate", self._evaluate_in_worker, prepare=lambda: self.batches)
        self._sizes: dict[str, _Size] = {}
        #: Size -> how long its last evaluation took on a CPU.
        self._seconds: dict[str, float] = {}

    def __call__(self, state: Mapping[str, Tensor], round_number: int = 0) -> dict[str, Score]:
        """Return the score of every size, with its part of the global state after a round."""
        return self.start(state, round_number).scores()

    def start(self, state: Mapping[str, Tensor], round_number: int) -> PendingScores:
        """Start to evaluate every size.

        On a GPU, and on a CPU with worker processes, this returns before the scores are there. The
        caller may overwrite or drop the state: it has been copied, on a GPU in stream order.
        """
        parts = {}
        for name in self._split.sizes:
            parts[name] = take(state, self._split.evaluated(name, round_number))
        # A size that was never measured counts as one second, so that workers are tried.
        seconds = [self._seconds.get(name, 1.0) for name in parts]
        pool = self._workers
        if pool is not None and is_worthwhile_in_background(seconds, pool.workers):
            return self._start_in_workers(pool, parts)
        sums = {name: self._size(name).start(part) for name, part in parts.items()}
        return Evaluation(sums, self._task, self._classes)

    def _start_in_workers(self, pool: WorkerPool, parts: Mapping[str, State]) -> WorkerEvaluation:
        """Evaluate sizes in worker processes, those that take longest first."""
        names = sorted(parts, key=lambda name: self._seconds.get(name, 0.0), reverse=True)
        tasks = [WorkerTask(name, {"part": parts[name]}) for name in names]

        def finish(results: Sequence[Result]) -> dict[str, Score]:
            sums = {}
            for name, result in zip(names, results, strict=True):
                self._seconds[name] = result.seconds
                sums[name] = AsyncCopy(result.tensors["sums"]["sums"])
            in_order = {name: sums[name] for name in self._split.sizes}
            return Evaluation(in_order, self._task, self._classes).scores()

        return WorkerEvaluation(pool.start("evaluate", tasks), finish)

    def _evaluate_in_worker(self, task: WorkerTask) -> Result:
        """Evaluate one size, in a worker."""
        name: str = task.header
        if sum(size.num_bytes for size in self._sizes.values()) > KEPT_BYTES:
            self._sizes.clear()
        vector = self._size(name).evaluate(task.tensors["part"])
        return Result(None, {"sums": {"sums": vector}})

    def _size(self, name: str) -> _Size:
        """Return the evaluator of a size. It is built when the size is first evaluated."""
        if name not in self._sizes:
            model = self._split.build(name)
            test_sums = TestSums(self._task, self._classes, self.batches.data.device)
            self._sizes[name] = _Size(model, self.batches, test_sums, self._kernels, self._compiled)
        return self._sizes[name]

    @cached_property
    def batches(self) -> TestBatches:
        """The test set on the device, in batches."""
        return TestBatches(self._data(), self._settings.batch_size)


class PendingScores(Protocol):
    """Scores that a GPU, or worker processes, may still be computing."""

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        ...

    def scores(self) -> dict[str, Score]:
        """Wait for the scores of all evaluated sizes and return them."""
        ...


class Evaluation:
    """The result of an evaluation that may still be running on the device."""

    def __init__(self, sums: dict[str, AsyncCopy], task: Task, classes: int) -> None:
        self._sums, self._task, self._classes = sums, task, classes

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return all(sums.ready for sums in self._sums.values())

    def scores(self) -> dict[str, Score]:
        """Wait for the device and return the score of every size."""
        scores = {}
        for size, sums in self._sums.items():
            scores[size] = Score.of(self._task, self._classes, sums.read())
        return scores


class WorkerEvaluation:
    """An evaluation in worker processes. `finish` makes scores of the tasks' results."""

    def __init__(
        self, tasks: BackgroundTasks, finish: Callable[[Sequence[Result]], dict[str, Score]]
    ) -> None:
        self._tasks, self._finish = tasks, finish

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return self._tasks.ready

    def scores(self) -> dict[str, Score]:
        """Wait for the workers and return the score of every size."""
        return self._finish(self._tasks.results())


class OwnModelScores:
    """The scores of clients' own models: for each size, the mean over its clients.

    `sums` are the sizes of the clients and the sums of each over its test set
    (`motley.methods.evaluation`). Clients may have different test sets.
    """

    def __init__(
        self,
        sums: Sequence[tuple[str, Mapping[str, Tensor]]],
        task: Task = CLASSIFICATION,
        *,
        classes: int,
    ) -> None:
        self._task, self._classes = task, classes
        self._sizes = [size for size, _ in sums]
        self._rows = AsyncCopy(torch.stack([as_vector(task, classes, own) for _, own in sums]))

    @property
    def ready(self) -> bool:
        """Whether the scores can be read without waiting."""
        return self._rows.ready

    def scores(self) -> dict[str, Score]:
        """Wait for the device and return the score of every size that some client has."""
        by_size: dict[str, list[Score]] = {}
        for size, row in zip(self._sizes, self._rows.read(), strict=True):
            by_size.setdefault(size, []).append(Score.of(self._task, self._classes, row))
        return {size: mean_score(by_size[size]) for size in by_size}


def mean_score(scores: Sequence[Score]) -> Score:
    """Return the mean of every metric over scores.

    The accuracy of a class is the mean over the scores that have test examples of it.
    """
    by_class: list[float | None] = []
    for accuracies in zip(*(score.class_accuracy for score in scores), strict=True):
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        by_class.append(sum(known) / len(known) if known else None)
    value = sum(score.value for score in scores) / len(scores)
    loss = sum(score.loss for score in scores) / len(scores)
    others = {}
    for name in scores[0].others:
        others[name] = sum(score.others[name] for score in scores) / len(scores)
    return Score(value, loss, tuple(by_class), scores[0].metric, others)


class TestBatches:
    """The test set in single-precision batches, prepared once if they fit into `PREPARED_BYTES`."""

    __test__ = False

    def __init__(self, data: DeviceData, batch_size: int) -> None:
        self.data, self.size = data, min(batch_size, len(data))
        self._rows = torch.arange(len(data), device=data.device).split(batch_size)
        num_bytes = len(data) * math.prod(dims_of(data.shape)) * torch.float32.itemsize
        self._prepared: list[tuple[Tensor, Tensor]] | None = None
        if num_bytes <= PREPARED_BYTES:
            self._prepared = [data.batch(rows) for rows in self._rows]

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
        test_sums: TestSums,
        kernels: Collection[str],
        compiled: bool,
    ) -> None:
        self.batches, self.device = batches, batches.data.device
        self.model = place(model, self.device).eval()
        self._has_kernels = self.device.type == "cuda" and bool(kernels)
        if self._has_kernels:
            self.model = apply_kernels(self.model, kernels)
        self._compiled = compiled
        if compiled:
            compile_model(self.model)
        self._tensors = self.model.state_dict()
        self._targets = by_type(self._tensors.values())
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._test_sums = test_sums

    @property
    def num_bytes(self) -> int:
        """The bytes of the model's weights."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def start(self, part: State) -> AsyncCopy:
        """Evaluate this size's part of a state without waiting for the device."""
        if self.stream is None:
            return AsyncCopy(self.evaluate(part))
        server = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(server)
        with torch.cuda.stream(self.stream):
            self._copy(part)
            # The server may change its state once it has been copied; it need not wait for more.
            server.wait_event(self.stream.record_event())
            if self._graph is None:
                if self._has_kernels:
                    with compiling_ahead(available_cores()):
                        self._add_up()
                # A capture needs a warm-up: libraries choose algorithms and allocate workspaces.
                self._add_up()
                torch.cuda.synchronize(self.device)
                self._graph = torch.cuda.CUDAGraph()
                with capture(self._graph, self.stream):
                    self._add_up()
            self._graph.replay()
            return AsyncCopy(self._test_sums.vector)

    def evaluate(self, part: State) -> Tensor:
        """Evaluate this size's part of a state, and return its sums over the test set."""
        self._copy(part)
        self._add_up()
        return self._test_sums.vector.clone()

    @torch.no_grad()
    def _copy(self, part: State) -> None:
        sources = by_type(part[name] for name in self._tensors)
        for targets, values in zip(self._targets, sources, strict=True):
            if targets:
                torch._foreach_copy_(targets, values)

    @torch.no_grad()
    def _add_up(self) -> None:
        """Compute the sums over the whole test set."""
        self._test_sums.vector.zero_()
        for inputs, targets in self.batches:
            self._test_sums.add(self._outputs(inputs), targets)

    def _outputs(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs."""
        if not self._compiled:
            return self.model(inputs)
        # The model is compiled for whole batches only; the last batch may be shorter.
        with compilation() if len(inputs) == self.batches.size else no_compilation():
            return self.model(inputs)


@dataclass(frozen=True)
class Summary:
    """The summary of a series of scores."""

    last: float
    best: float
    best_round: int
    mean_of_last_k: float


def summarize(
    rounds: Sequence[int], values: Sequence[float], last_k: int, metric: MetricInfo = ACCURACY
) -> Summary:
    """Return the last and the best value of a metric, and the mean of the last k.

    If several rounds have the best value, the earliest counts.
    """
    best = metric.best(values)
    tail = values[-last_k:]
    return Summary(values[-1], best, rounds[values.index(best)], sum(tail) / len(tail))


def rounds_to(
    target: float, rounds: Sequence[int], values: Sequence[float], metric: MetricInfo = ACCURACY
) -> int | None:
    """Return the first round that is at least as good as a target, or None if there is none."""
    for number, value in zip(rounds, values, strict=True):
        if metric.reaches(value, target):
            return number
    return None
