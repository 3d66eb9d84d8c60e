"""How far apart the features of two clients are, class by class: FedImpro's Definition 4.1.

    C(D, D') = 1/2 E_{y ~ D} W(D|y, D'|y) + 1/2 E_{y ~ D'} W(D|y, D'|y)

W is the Wasserstein distance of order 1. For features of many dimensions it is computed sliced: the mean over random
directions of the distance along each, which is exact in one dimension and never larger than the whole distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motley.errors import MotleyError


def conditional_wasserstein(
    features: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, *, directions: int = 64, seed: int = 0
) -> float:
    """Return the conditional distance between two sets of labelled features, (examples, ...).

    A class that only one of them has leaves both expectations: there is nothing to compare it with.
    """
    shared = sorted(set(labels.tolist()) & set(other_labels.tolist()))
    if not shared:
        raise MotleyError("the two sets of features have no class in common.")
    pairs = [(features[labels == label], others[other_labels == label]) for label in shared]
    distances = torch.tensor([sliced_wasserstein(*pair, directions=directions, seed=seed) for pair in pairs])
    counts = torch.tensor([[len(one), len(other)] for one, other in pairs], dtype=distances.dtype)
    return float((counts / counts.sum(0)).mean(1) @ distances)


def sliced_wasserstein(one: Tensor, other: Tensor, *, directions: int = 64, seed: int = 0) -> float:
    """Return the mean distance along random directions between two sets of vectors, (examples, ...)."""
    first, second = (x.detach().flatten(1).double().cpu() for x in (one, other))
    if first.shape[1] > 1:
        numbers = torch.Generator().manual_seed(seed)
        along = torch.randn(first.shape[1], directions, generator=numbers, dtype=torch.float64)
        along = along / along.norm(dim=0)
        first, second = first @ along, second @ along
    return float(_wasserstein(first, second).mean())


def _wasserstein(one: Tensor, other: Tensor) -> Tensor:
    """Return, for each column, the area between the quantile functions of two sets of numbers, (examples, columns)."""
    one, other = one.sort(0).values, other.sort(0).values
    steps = [torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x) for x in (one, other)]
    ends = torch.cat(steps).sort().values
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.float64))
    middles = ends - lengths / 2
    places = [(middles * len(x)).long().clamp_max(len(x) - 1) for x in (one, other)]
    return lengths @ (one[places[0]] - other[places[1]]).abs()
