"""What a federation learns: the loss, and the metric by which its models are compared.

A data set names its task (`Dataset.task`). Client algorithms compute their loss with
`step.task_loss`, so a method works for any task unless it needs classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from motley.core.registry import Registry


class Task:
    """A task. Subclasses define the loss of each example."""

    #: The primary metric's name, as it is written in records, tables and reports.
    metric: str = "accuracy"
    higher_is_better: bool = True
    #: Whether targets are class numbers of shape (N,): partitions by label, accuracy per class, and
    #: methods that exchange something per class need it.
    has_classes: bool = False

    def example_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, with shape (N,), in single precision."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, in single precision."""
        return self.example_losses(outputs, targets).mean()


TASKS: Registry[Task] = Registry("task")


class Classification(Task):
    """One class per example; targets are class numbers. The loss is cross-entropy."""

    has_classes = True

    def example_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return F.cross_entropy(outputs.float(), targets, reduction="none")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, computed in one fused operation."""
        return F.cross_entropy(outputs.float(), targets)


CLASSIFICATION = TASKS.register("classification", "one class per example: cross-entropy, accuracy")(
    Classification()
)
