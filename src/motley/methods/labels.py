"""Labels as vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return 1 for the class of each label and 0 for the others, one row per label.

    `torch.nn.functional.one_hot` checks the labels on the host, which no captured step may do.
    """
    return (labels[:, None] == torch.arange(classes, device=labels.device)).float()
