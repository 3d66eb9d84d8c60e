"""The loss that a client's steps minimize: the task's, with the regularization that a run asks for.

- Label smoothing is part of the task that is given (`Task.with_label_smoothing`).
- Mixup (Zhang et al., ICLR 2018): inputs of a batch are mixed in pairs, and so are the losses for
  their two targets.
- Logit adjustment (Menon et al., ICLR 2021): tau log p_c is added to the logit of class c, where
  p_c is its share of the client's examples. A client that has many examples of a class would
  otherwise raise this class's logit for every input, and clients with other classes would pull it
  back. With tau = 1 this is the balanced softmax (Ren et al., NeurIPS 2020). The evaluated model
  has no such term.

Mixup and logit adjustment are for the client's own batches. The loss of other inputs, such as
generated features, has neither of them, but it is smoothed.

Label smoothing and logit adjustment do not go well together. The smoothed target gives every class
the same small share, and the adjustment makes it hard for a rare class to have that share: in the
extreme, a class that the client does not have gets a larger logit than the true one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motley.client.training import TrainingSettings
from motley.core.errors import MotleyError
from motley.tasks import Task

#: A class that the client does not have counts as half an example, so that its logarithm is finite.
SMALLEST_COUNT = 0.5


class TrainingLoss:
    """The loss of the batches of one client at a time. Captured steps read its tensors."""

    def __init__(
        self, task: Task, training: TrainingSettings, classes: int, device: torch.device
    ) -> None:
        self._task, self._tau = task, training.logit_adjustment
        #: The settings that change the loss, in words; empty if none does.
        self._changes = _changes(training)
        #: Whether a method has computed the loss of a batch here.
        self._used = False
        #: Added to the logits.
        self._adjustment = torch.zeros(classes, device=device) if self._tau else None
        #: With mixup, the weight of an example's own input and target in this step.
        self._mix: Tensor | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether `load` needs to know the classes of the client's examples."""
        return self._adjustment is not None

    def load(self, counts: Tensor) -> None:
        """Begin a client that has so many examples of each class."""
        if self._adjustment is not None:
            counts = counts.clamp(min=SMALLEST_COUNT)
            self._adjustment.copy_(self._tau * (counts / counts.sum()).log())

    def begin_batch(self, inputs: Tensor, mix: Tensor | None) -> Tensor:
        """Return a batch's inputs, mixed if there is a weight for that."""
        self._mix = mix
        return inputs if mix is None else _mixed(mix, inputs, inputs.flip(0))

    def end_batch(self) -> None:
        """Let go of the batch's weight, so that a captured graph can use its memory again."""
        self._mix = None

    def check_used(self, method: str) -> None:
        """Raise after steps that did not compute this loss if the run asks for a change of it.

        Methods of Motley's own are refused beforehand if they have another loss. Of a user's method
        this is known only when it has trained. Captured steps have run once in Python, too.
        """
        if self._changes and not self._used:
            raise MotleyError(
                f"{self._changes}: has no effect, because the clients of method.name = {method!r} "
                "do not compute their loss with step.task_loss(outputs, step.targets). Let them do "
                "so, or use 0."
            )

    def __call__(self, outputs: Tensor, targets: Tensor, *, own: bool) -> Tensor:
        """Return the mean loss of a batch, in single precision.

        `own`: the outputs are for the inputs of this step's batch.
        """
        self._used = self._used or own
        if own and self._adjustment is not None:
            outputs = outputs.float() + self._adjustment
        loss = self._task.loss(outputs, targets)
        if self._mix is None or not own:
            return loss
        return _mixed(self._mix, loss, self._task.loss(outputs, targets.flip(0))).squeeze()


def _changes(training: TrainingSettings) -> str:
    """Return the settings that change the loss, for messages."""
    changes = []
    for name in ("label_smoothing", "mixup", "logit_adjustment"):
        value = getattr(training, name)
        if value:
            changes.append(f"training.{name} = {value:g}")
    return ", ".join(changes)


def _mixed(weight: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return the mean of two tensors, in their type."""
    return (weight * own + (1 - weight) * other).to(own.dtype)
