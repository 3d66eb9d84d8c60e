"""The counts from which a client's own model is scored on a test set.

Methods that exchange no weights have no global model, so clients evaluate their own models where
they are, and send these counts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.part import State

#: Names of the counts: correct predictions per class, test images per class, summed loss.
CORRECT, SEEN, LOSS = "correct", "seen", "loss"


class TestCounts:
    """Counts over the batches of a test set, in double precision on the device."""

    __test__ = False

    def __init__(self, classes: int, device: torch.device) -> None:
        self._correct = torch.zeros(classes, dtype=torch.float64, device=device)
        self._seen = torch.zeros(classes, dtype=torch.float64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch."""
        correct = (logits.argmax(1) == labels).double()
        self._correct.index_add_(0, labels, correct)
        self._seen.index_add_(0, labels, torch.ones_like(correct))
        self._loss += F.cross_entropy(logits.float(), labels, reduction="sum")

    @property
    def accuracy(self) -> Tensor:
        """The fraction of correct predictions, as a tensor with one value."""
        return self._correct.sum() / self._seen.sum()

    def values(self) -> State:
        """Return the counts by name."""
        return {CORRECT: self._correct, SEEN: self._seen, LOSS: self._loss}
