"""A normal distribution of features for each class, coordinate by coordinate: estimated, merged, and drawn from.

A batch is summed up by products with the classes' indicators: nothing asks the device which classes it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """What is known of the features of each class."""

    counts: Tensor
    """Examples of each class."""
    mean: Tensor
    """(classes, values of a feature)"""
    variance: Tensor
    """Of the same shape; unbiased, as in torch.var. Zero where a class has fewer than two examples."""


def moments(features: Tensor, labels: Tensor, classes: int) -> Moments:
    """Return the moments of a batch, (examples, values), a class."""
    belongs = (labels[:, None] == torch.arange(classes, device=labels.device)).to(features.dtype)
    counts = belongs.sum(0)
    mean = belongs.t() @ features / counts.clamp_min(1)[:, None]
    squares = belongs.t() @ (features - mean[labels]).square()
    return Moments(counts, mean, squares / (counts - 1).clamp_min(1)[:, None])


def pooled(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all examples together, from those of disjoint parts of them."""
    counts, mean, variance = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    total = counts.sum(0)
    whole = (counts[..., None] * mean).sum(0) / total.clamp_min(1)[:, None]
    within = ((counts - 1).clamp_min(0)[..., None] * variance).sum(0)
    between = (counts[..., None] * (mean - whole).square()).sum(0)
    return Moments(total, whole, (within + between) / (total - 1).clamp_min(1)[:, None])


def balanced(labels: Tensor, classes: int, count: int) -> Tensor:
    """Return every class equally often, more than `count` labels in all."""
    return torch.arange(classes, device=labels.device).repeat(count // classes + 1)


def repeated(labels: Tensor, count: int) -> Tensor:
    """Return `count` labels: those of a batch, from the start again and again."""
    return labels.repeat(-(-count // len(labels)))[:count]


def draw(mean: Tensor, deviation: Tensor, labels: Tensor) -> Tensor:
    """Return a feature for each label."""
    return mean[labels] + deviation[labels] * torch.randn_like(mean[labels])
