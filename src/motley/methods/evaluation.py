"""The sums from which a model is scored on a test set.

They are sums over examples, so the sums of batches and of clients can be added. Methods that
exchange no weights have no global model: their clients evaluate their own models locally, and send
these sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motley.core.part import State
from motley.tasks import Task

#: Names of the sums: the loss, the number of examples, the metrics' own sums, and for
#: classification the correct predictions and the test examples per class.
LOSS, EXAMPLES, METRICS, CORRECT, SEEN = "loss", "examples", "metrics", "correct", "seen"


def widths_of(task: Task, classes: int) -> dict[str, int]:
    """Return how many numbers each of a task's sums has, in the order of `TestSums.vector`."""
    per_class = classes if task.has_classes else 0
    return {
        LOSS: 1,
        EXAMPLES: 1,
        METRICS: sum(metric.num_sums(classes) for metric in task.metrics),
        CORRECT: per_class,
        SEEN: per_class,
    }


class TestSums:
    """Sums over the batches of a test set, in double precision on the device."""

    __test__ = False

    def __init__(self, task: Task, classes: int, device: torch.device) -> None:
        self.task = task
        widths = widths_of(task, classes)
        #: All sums, one after the other. The sums by name are parts of it.
        self.vector = torch.zeros(sum(widths.values()), dtype=torch.float64, device=device)
        self._sums: State = dict(zip(widths, self.vector.split(list(widths.values())), strict=True))

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        sums = self._sums
        sums[LOSS] += self.task.example_losses(outputs, targets).double().sum()
        sums[EXAMPLES] += len(targets)
        rows, row_targets = self.task.rows(outputs, targets)
        sums[METRICS] += torch.cat([metric.sums(rows, row_targets) for metric in self.task.metrics])
        if self.task.has_classes:
            correct = (outputs.argmax(1) == targets).double()
            sums[CORRECT].index_add_(0, targets, correct)
            sums[SEEN].index_add_(0, targets, torch.ones_like(correct))

    @property
    def accuracy(self) -> Tensor:
        """The fraction of correct predictions of a classification, as a tensor with one value."""
        return self._sums[CORRECT].sum() / self._sums[SEEN].sum()

    def values(self) -> State:
        """Return the sums by name."""
        return {name: tensor for name, tensor in self._sums.items() if len(tensor)}


class Totals(NamedTuple):
    """The scores that follow from the sums over a test set."""

    #: The metrics of the task, by name, in its order.
    metrics: dict[str, float]
    #: The mean loss.
    loss: float
    #: Accuracy per class; None for a class that has no test example; empty without classes.
    class_accuracy: tuple[float | None, ...]


def totals(task: Task, classes: int, vector: Sequence[float]) -> Totals:
    """Return the metrics for the sums over a whole test set (`TestSums.vector`)."""
    sums: dict[str, Sequence[float]] = {}
    start = 0
    for name, width in widths_of(task, classes).items():
        sums[name] = vector[start : start + width]
        start += width
    metrics = {}
    start = 0
    for metric in task.metrics:
        end = start + metric.num_sums(classes)
        metrics[metric.name] = metric.value(sums[METRICS][start:end])
        start = end
    by_class: list[float | None] = []
    for correct, seen in zip(sums[CORRECT], sums[SEEN], strict=True):
        by_class.append(correct / seen if seen else None)
    return Totals(metrics, sums[LOSS][0] / sums[EXAMPLES][0], tuple(by_class))


def as_vector(task: Task, classes: int, sums: Mapping[str, Tensor]) -> Tensor:
    """Return named sums, as a client sent them, one after the other."""
    pieces = [sums[name] for name, width in widths_of(task, classes).items() if width]
    return torch.cat([piece.double() for piece in pieces])
