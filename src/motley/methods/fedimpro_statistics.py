"""FedImpro's normal distribution of features for each class: estimated, merged, and drawn from.

Coordinates are independent. A batch is summed up by products with the classes' indicators, so the
host never has to ask the device which classes a batch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Estimates for the features of each class."""

    #: Examples of each class.
    counts: Tensor
    #: (classes, values of a feature)
    mean: Tensor
    #: Of the same shape; unbiased, as in torch.var. Zero for a class with fewer than two examples.
    variance: Tensor


def moments(features: Tensor, labels: Tensor, classes: int) -> Moments:
    """Return the moments of a batch of features (examples, values), per class."""
    belongs = (labels[:, None] == torch.arange(classes, device=labels.device)).to(features.dtype)
    counts = belongs.sum(0)
    mean = belongs.t() @ features / counts.clamp_min(1)[:, None]
    squares = belongs.t() @ (features - mean[labels]).square()
    return Moments(counts, mean, squares / (counts - 1).clamp_min(1)[:, None])


def pooled(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all examples together, from the moments of disjoint groups."""
    counts, mean, variance = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    total = counts.sum(0)
    whole = (counts[..., None] * mean).sum(0) / total.clamp_min(1)[:, None]
    within = ((counts - 1).clamp_min(0)[..., None] * variance).sum(0)
    between = (counts[..., None] * (mean - whole).square()).sum(0)
    return Moments(total, whole, (within + between) / (total - 1).clamp_min(1)[:, None])


def balanced(labels: Tensor, classes: int, count: int) -> Tensor:
    """Return more than `count` labels, every class equally often."""
    return torch.arange(classes, device=labels.device).repeat(count // classes + 1)


def repeated(labels: Tensor, count: int) -> Tensor:
    """Return `count` labels: a batch's labels, repeated as often as needed."""
    return labels.repeat(-(-count // len(labels)))[:count]


def draw(mean: Tensor, deviation: Tensor, labels: Tensor) -> Tensor:
    """Draw one feature per label."""
    return mean[labels] + deviation[labels] * torch.randn_like(mean[labels])
