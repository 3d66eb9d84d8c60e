"""Tasks: the loss, the metrics, and which direction of a metric is better.

A data set names its task (`Dataset.task`). Client algorithms compute their loss with
`step.task_loss`, so a method works for any task unless it needs classes. The settings `task.loss`
and `task.metrics` choose other losses and metrics, by name or as "package.module:function".

Losses and metrics see *rows*: outputs in single precision and their targets. For classification and
regression a row is an example; for next tokens it is one position of a sequence.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.registry import Registry

#: (outputs, targets) -> one value per row, or several values per row.
RowFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# ---- metrics


@dataclass(frozen=True)
class MetricInfo:
    """A metric's name, unit and direction, for tables and reports."""

    #: The name in records, tables and reports.
    name: str
    higher_is_better: bool = True
    #: Whether it is a fraction that is shown in percent.
    percent: bool = False

    @property
    def label(self) -> str:
        """The name with its unit, for a table's heading or an axis."""
        return f"{self.name}, %" if self.percent else self.name

    @property
    def direction(self) -> str:
        """The direction that is better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    def scaled(self, value: float) -> float:
        """Return a value as it is shown: in percent, if the metric is a fraction."""
        return 100 * value if self.percent else value

    def text(self, value: float, digits: int = 2) -> str:
        """Return a value as text, with a percent sign if the metric is a fraction."""
        return f"{value:.{digits}%}" if self.percent else f"{value:.{digits + 2}g}"

    def best(self, values: Sequence[float]) -> float:
        """Return the best of several values."""
        return max(values) if self.higher_is_better else min(values)

    def reaches(self, value: float, target: float) -> bool:
        """Tell whether a value is at least as good as a target."""
        return value >= target if self.higher_is_better else value <= target


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A metric that is computed from sums over rows, so that it is exact over batches and clients.

    This one is the mean of a function over all rows; subclasses have other sums.
    """

    #: Returns one value per row.
    values: RowFunction | None = None
    #: The targets it is defined for: "classes", "numbers", or "" for all.
    targets: str = ""

    def num_sums(self, outputs: int) -> int:
        """Return how many sums it needs, for a model with so many outputs."""
        return 2

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over some rows, in double precision."""
        return self.row_sums(outputs, targets).sum(0)

    def row_sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each row's contribution to the sums, with shape (rows, sums), in double precision.

        With them, rows of different clients can be summed separately.
        """
        assert self.values is not None
        values: object = self.values(outputs, targets)
        if not isinstance(values, Tensor):
            raise MotleyError(
                f"task.metrics: {self.name!r} returned {describe(values)}; a tensor with one value "
                "per row is expected."
            )
        if values.dim() == 0 or len(values) != len(targets):
            raise MotleyError(
                f"task.metrics: {self.name!r} returned shape {tuple(values.shape)} for "
                f"{len(targets)} rows. A metric returns one value per row, not their mean."
            )
        numbers = values.double().reshape(len(targets), -1)
        totals = numbers.sum(1)
        return torch.stack([totals, torch.full_like(totals, numbers.shape[1])], dim=1)

    def value(self, sums: Sequence[float]) -> float:
        """Return the metric for the sums over all rows."""
        total, count = sums
        return total / count


def _is_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(-1) == targets


def _is_in_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    best = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    return (best == targets.unsqueeze(-1)).any(-1)


def _negative_log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def _absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


class Perplexity(Metric):
    """exp of the mean negative log-likelihood."""

    def value(self, sums: Sequence[float]) -> float:
        mean = super().value(sums)
        return math.exp(mean) if mean < 700 else math.inf


class RootMeanSquare(Metric):
    """The square root of a mean of squares."""

    def value(self, sums: Sequence[float]) -> float:
        return math.sqrt(super().value(sums))


class R2(Metric):
    """The fraction of the targets' variance that is explained, as a mean over outputs."""

    def num_sums(self, outputs: int) -> int:
        return 3 * outputs + 1

    def row_sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = (outputs - targets).double().square()
        doubles = targets.double()
        return torch.cat([errors, doubles, doubles.square(), torch.ones_like(errors[:, :1])], dim=1)

    def value(self, sums: Sequence[float]) -> float:
        *rest, count = sums
        outputs = len(rest) // 3
        fractions = []
        for number in range(outputs):
            error, total, squares = rest[number::outputs]
            variation = squares - total * total / count
            fractions.append(1 - error / variation if variation > 0 else math.nan)
        return sum(fractions) / len(fractions)


#: A metric, or a function that returns one value per row, whose mean is the metric.
METRICS: Registry[Any] = Registry("metric", group="motley.metrics")
ACCURACY = Metric("accuracy", True, True, _is_right, "classes")
METRICS.register("accuracy", "fraction of rows whose largest output is the target's")(ACCURACY)
METRICS.register("top5", "fraction of rows whose target is among the five largest outputs")(
    Metric("top5", True, True, _is_in_top5, "classes")
)
METRICS.register("perplexity", "exp of the mean negative log-likelihood")(
    Perplexity("perplexity", False, False, _negative_log_likelihood, "classes")
)
METRICS.register("rmse", "root of the mean squared error")(
    RootMeanSquare("rmse", False, False, _squared_error, "numbers")
)
METRICS.register("mae", "mean absolute error")(
    Metric("mae", False, False, _absolute_error, "numbers")
)
METRICS.register("r2", "explained fraction of the targets' variance")(
    R2("r2", True, False, targets="numbers")
)


def as_metric(item: Any) -> Metric:
    """Return a user's metric: a `Metric`, or a function whose mean over rows is the metric."""
    if isinstance(item, Metric):
        return item
    if callable(item) and not isinstance(item, type):
        return Metric(getattr(item, "__name__", type(item).__name__), values=item)
    raise MotleyError(
        f"a motley.tasks.Metric is expected, or a function (outputs, targets) that returns one "
        f"value per row, not a {type(item).__name__}."
    )


# ---- losses


@dataclass(frozen=True)
class Loss:
    """A loss of outputs and targets."""

    #: Returns one value per row, or several per row.
    values: RowFunction
    #: Returns the mean over rows, if that is faster than the mean of `values`.
    mean: RowFunction | None = None
    #: The targets it is defined for: "classes", "numbers", or "" for all.
    targets: str = ""

    @classmethod
    def of_torch(cls, function: Callable[..., Tensor], targets: str) -> Loss:
        """Return one of torch's losses, which can also compute the mean themselves."""
        return cls(partial(function, reduction="none"), function, targets)


#: A loss, or a function that returns the loss of each row.
LOSSES: Registry[Any] = Registry("loss", group="motley.losses")
CROSS_ENTROPY = Loss.of_torch(F.cross_entropy, "classes")
LOSSES.register("cross-entropy", "cross-entropy of logits")(CROSS_ENTROPY)
MSE = Loss.of_torch(F.mse_loss, "numbers")
LOSSES.register("mse", "squared error")(MSE)
LOSSES.register("l1", "absolute error")(Loss.of_torch(F.l1_loss, "numbers"))
LOSSES.register("huber", "squared error up to 1, absolute error beyond")(
    Loss.of_torch(F.huber_loss, "numbers")
)


def as_loss(item: Any) -> Loss:
    """Return a user's loss: a `Loss`, or a function that returns the loss of each row."""
    if isinstance(item, Loss):
        return item
    if callable(item) and not isinstance(item, type):
        return Loss(item)
    raise MotleyError(
        "a function (outputs, targets) is expected that returns the loss of each row, not a "
        f"{type(item).__name__}."
    )


# ---- tasks


class Task:
    """A task: its loss and its metrics. The first metric is the primary one."""

    name: ClassVar[str]
    #: Whether targets are class numbers of shape (N,): partitions by label, accuracy per class, and
    #: methods that exchange something per class need it.
    has_classes: ClassVar[bool] = False
    #: The kind of targets, for losses and metrics: "classes" or "numbers".
    targets: ClassVar[str] = "classes"
    loss_function: Loss
    metrics: tuple[Metric, ...]

    def __init__(self, loss: Loss, metrics: tuple[Metric, ...]) -> None:
        self.loss_function, self.metrics = loss, metrics

    @property
    def primary(self) -> Metric:
        """The metric by which models are compared."""
        return self.metrics[0]

    @property
    def metric(self) -> str:
        """The primary metric's name, as it is written in records, tables and reports."""
        return self.primary.name

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of the primary metric is better."""
        return self.primary.higher_is_better

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, in single precision, and the targets, row by row."""
        return outputs.float(), targets

    def example_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, with shape (N,), in single precision."""
        rows, row_targets = self.rows(outputs, targets)
        values: object = self.loss_function.values(rows, row_targets)
        if not isinstance(values, Tensor):
            raise MotleyError(
                f"task.loss: returned {describe(values)}; a tensor with one value per row is "
                "expected."
            )
        if values.dim() == 0 or len(values) != len(rows):
            raise MotleyError(
                f"task.loss: returned shape {tuple(values.shape)} for {len(rows)} rows. A loss "
                "returns one value per row (reduction='none'), not their mean."
            )
        return values.reshape(len(targets), -1).mean(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, in single precision."""
        if self.loss_function.mean is None:
            return self.example_losses(outputs, targets).mean()
        return self.loss_function.mean(*self.rows(outputs, targets))

    def with_label_smoothing(self, amount: float) -> Task:
        """Return this task with a loss whose targets give `amount` of their weight to all classes
        alike.
        """
        if not amount:
            return self
        if self.loss_function is not CROSS_ENTROPY:
            raise MotleyError(
                f"training.label_smoothing = {amount:g}: is for the loss 'cross-entropy'. Use "
                "training.label_smoothing = 0 with other losses."
            )
        smoothed = copy.copy(self)
        cross_entropy = partial(F.cross_entropy, label_smoothing=amount)
        smoothed.loss_function = Loss.of_torch(cross_entropy, "classes")
        return smoothed

    def with_choices(self, loss: str, metrics: Sequence[str]) -> Task:
        """Return this task with another loss and other metrics; empty: its own.

        Both are names of `LOSSES` and `METRICS`. The first metric is the primary one.
        """
        chosen = copy.copy(self)
        if loss:
            chosen.loss_function = as_loss(LOSSES.entry(loss, "task.loss").item)
            self._check_targets("task.loss", loss, chosen.loss_function.targets)
        if metrics:
            chosen_metrics = []
            for name in metrics:
                metric = as_metric(METRICS.entry(name, "task.metrics").item)
                self._check_targets("task.metrics", name, metric.targets)
                chosen_metrics.append(metric)
            names = [metric.name for metric in chosen_metrics]
            if len(set(names)) < len(names):
                raise MotleyError(f"task.metrics = {list(metrics)}: two metrics have one name.")
            chosen.metrics = tuple(chosen_metrics)
        return chosen

    def _check_targets(self, key: str, name: str, targets: str) -> None:
        if targets in ("", self.targets):
            return
        registry = LOSSES if key == "task.loss" else METRICS
        fitting = [entry.name for entry in registry if entry.item.targets in ("", self.targets)]
        raise MotleyError(
            f"{key} = {name!r}: is for targets that are {targets}, and those of task "
            f"{self.name!r} are {self.targets}. Allowed are {', '.join(fitting)}, or your own."
        )

    def expected_outputs(self, targets: Sequence[int], outputs: int) -> str:
        """Return, in words, the outputs that a model must return for one example."""
        raise NotImplementedError

    def fits(self, shape: Sequence[int], targets: Sequence[int], outputs: int) -> bool:
        """Tell whether a model's output for one example fits the targets.

        Args:
            shape: The output's shape for one example.
            targets: The shape of one example's targets.
            outputs: The number of classes, tokens, or predicted numbers.
        """
        raise NotImplementedError


def _accept_task(item: Any) -> Task:
    if isinstance(item, Task):
        return item
    raise MotleyError(
        f"is {describe(item)}; an object of a subclass of motley.tasks.Task is expected."
    )


TASKS: Registry[Task] = Registry("task", group="motley.tasks", accept=_accept_task)
METRICS.accept_with(as_metric)
LOSSES.accept_with(as_loss)


class Classification(Task):
    """One class per example; targets are class numbers. The loss is cross-entropy."""

    name = "classification"
    has_classes = True

    def expected_outputs(self, targets: Sequence[int], outputs: int) -> str:
        return f"one row of {outputs} logits per example"

    def fits(self, shape: Sequence[int], targets: Sequence[int], outputs: int) -> bool:
        return tuple(shape) == (outputs,)


class NextToken(Task):
    """The next token, of a sequence or at each of its positions; targets are token numbers."""

    name = "next-token"

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if targets.dim() == 1:
            # A model with outputs at every position predicts the next token at its last one.
            last = outputs[:, -1] if outputs.dim() == 3 else outputs
            return last.float(), targets
        return outputs.flatten(0, 1).float(), targets.flatten()

    def expected_outputs(self, targets: Sequence[int], outputs: int) -> str:
        if not targets:
            return f"one row of {outputs} logits per sequence, or one per position"
        return f"{targets[0]} rows of {outputs} logits per sequence, one per position"

    def fits(self, shape: Sequence[int], targets: Sequence[int], outputs: int) -> bool:
        if targets:
            return tuple(shape) == (*targets, outputs)
        return len(shape) in (1, 2) and shape[-1] == outputs


class Regression(Task):
    """One number per example, or several; targets are numbers. The loss is the squared error."""

    name = "regression"
    targets = "numbers"

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = outputs.float()
        if outputs.dim() == 1:
            outputs = outputs.unsqueeze(1)
        return outputs, targets.float().reshape(outputs.shape)

    def expected_outputs(self, targets: Sequence[int], outputs: int) -> str:
        return f"{outputs} number{'s' * (outputs > 1)} per example"

    def fits(self, shape: Sequence[int], targets: Sequence[int], outputs: int) -> bool:
        return tuple(shape) == (outputs,) or (outputs == 1 and not shape)


CLASSIFICATION = Classification(CROSS_ENTROPY, (ACCURACY,))
TASKS.register("classification", "one class per example: cross-entropy, accuracy")(CLASSIFICATION)
TASKS.register("next-token", "the next token: cross-entropy, accuracy per token and perplexity")(
    NextToken(CROSS_ENTROPY, (ACCURACY, METRICS["perplexity"]))
)
TASKS.register("regression", "numbers: squared error, RMSE, mean absolute error and R2")(
    Regression(MSE, (METRICS["rmse"], METRICS["mae"], METRICS["r2"]))
)
