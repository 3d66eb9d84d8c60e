"""How far apart the features of two clients are, class by class: FedImpro's Definition 4.1.

    C(D, D') = 1/2 E_{y ~ D} W(D|y, D'|y) + 1/2 E_{y ~ D'} W(D|y, D'|y)

W is the Wasserstein distance of order 1. For features of many dimensions it is computed sliced: the mean over random
directions of the distance along each, which is exact in one dimension and never larger than the whole distance.

The analysis looks at the clients of the round after a checkpoint, after their turn: what each stage of their models
makes of their own examples, in pairs of clients that have a class in common and features of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.features import features
from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.replay import kept_rounds, model_of, next_round, own_examples
from motley.core.errors import MotleyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = 200
"""Most examples of a client that are compared."""


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


@ANALYSES.register("wasserstein", "how far apart clients' features of a class are, a stage and over rounds")
def wasserstein(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint that was kept, and compare its clients' features in pairs."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in kept_rounds(paths):
        found = []
        for one in next_round(federation, server):
            images, labels = own_examples(federation, one.client, EXAMPLES)
            found.append((features(model_of(federation, one.size, one.state), images), labels))
        distances = stage_distances(found)
        rows += [(run, server.round_number, stage, d, pairs) for stage, (d, pairs) in distances.items()]
    if not rows:
        raise MotleyError("no two clients of a round have a class and features of one shape in common.")
    return Findings(("run", "round", "stage", "distance", "pairs"), rows, _draw(rows))


def stage_distances(clients: Sequence[tuple[dict[str, Tensor], Tensor]]) -> dict[str, tuple[float, int]]:
    """Return the mean conditional distance of each stage over pairs of clients, and how many pairs there are."""
    found: dict[str, list[float]] = {}
    for (one, labels), (other, other_labels) in combinations(clients, 2):
        if not set(labels.tolist()) & set(other_labels.tolist()):
            continue
        for stage in one:
            if stage in other and one[stage].shape[1:] == other[stage].shape[1:]:
                distance = conditional_wasserstein(one[stage], labels, other[stage], other_labels)
                found.setdefault(stage, []).append(distance)
    return {stage: (mean(distances), len(distances)) for stage, distances in found.items()}


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    figure = new_figure(8, 4)
    axis = figure.subplots()
    for run, stage in dict.fromkeys((row[0], row[2]) for row in rows):
        own = [row for row in rows if (row[0], row[2]) == (run, stage)]
        axis.plot([row[1] for row in own], [row[3] for row in own], marker="o", label=f"{run}, {stage}")
    axis.set(title="features of a class, between clients", xlabel="round", ylabel="sliced Wasserstein distance")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
