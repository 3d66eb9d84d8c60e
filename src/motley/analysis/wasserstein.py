"""Class-conditional distance of two clients' features: FedImpro's Definition 4.1.

    C(D, D') = 1/2 E_{y ~ D} W(D|y, D'|y) + 1/2 E_{y ~ D'} W(D|y, D'|y)

W is the Wasserstein distance of order 1. For features of several dimensions, the sliced distance is
computed: the mean, over random directions, of the distance of the projections. It is exact in one
dimension and never larger than the true distance.

The clients are taken from the round after a checkpoint, after their local updates. Their features
are computed by each stage of a client's model from the client's own examples. Clients are
compared in pairs that have a class in common and features of the same shape.
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
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import all_checkpoints, client_examples, model_of, train_next_round
from motley.core.errors import MotleyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: At most this many examples per client are compared.
EXAMPLES = 200


def conditional_wasserstein(
    features: Tensor,
    labels: Tensor,
    others: Tensor,
    other_labels: Tensor,
    *,
    directions: int = 64,
    seed: int = 0,
) -> float:
    """Return the conditional distance between two sets of labelled features, (examples, ...).

    Classes that occur in only one of the sets are left out of both expectations.
    """
    shared = sorted(set(labels.tolist()) & set(other_labels.tolist()))
    if not shared:
        raise MotleyError("the two sets of features have no class in common.")
    distances, counts = [], []
    for label in shared:
        of_class = features[labels == label]
        others_of_class = others[other_labels == label]
        distance = sliced_wasserstein(of_class, others_of_class, directions=directions, seed=seed)
        distances.append(distance)
        counts.append([len(of_class), len(others_of_class)])
    # One row per class: its probability in the first and in the second set.
    probabilities = torch.tensor(counts, dtype=torch.float32)
    probabilities /= probabilities.sum(0)
    return float(probabilities.mean(1) @ torch.tensor(distances))


def sliced_wasserstein(one: Tensor, other: Tensor, *, directions: int = 64, seed: int = 0) -> float:
    """Return the sliced distance between two sets of vectors, (examples, ...)."""
    first = one.detach().flatten(1).double().cpu()
    second = other.detach().flatten(1).double().cpu()
    if first.shape[1] > 1:
        generator = torch.Generator().manual_seed(seed)
        shape = (first.shape[1], directions)
        vectors = torch.randn(*shape, generator=generator, dtype=torch.float64)
        vectors = vectors / vectors.norm(dim=0)
        first, second = first @ vectors, second @ vectors
    return float(_wasserstein(first, second).mean())


def _wasserstein(one: Tensor, other: Tensor) -> Tensor:
    """Return, per column, the area between the quantile functions of two sets of numbers.

    Both are (examples, columns). The quantile functions are step functions, so the area is a sum
    over the intervals between the steps of either.
    """
    one, other = one.sort(0).values, other.sort(0).values
    steps = torch.arange(1, len(one) + 1, dtype=torch.float64) / len(one)
    other_steps = torch.arange(1, len(other) + 1, dtype=torch.float64) / len(other)
    ends = torch.cat([steps, other_steps]).sort().values
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.float64))
    middles = ends - lengths / 2
    rows = (middles * len(one)).long().clamp_max(len(one) - 1)
    other_rows = (middles * len(other)).long().clamp_max(len(other) - 1)
    return lengths @ (one[rows] - other[other_rows]).abs()


@analysis(
    "wasserstein",
    "distance of clients' features of the same class, per stage and over rounds",
    classes=True,
)
def wasserstein(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint, and compare its clients' features in pairs."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        clients = []
        for trained in train_next_round(federation, server):
            images, labels = client_examples(federation, trained.client, EXAMPLES)
            model = model_of(federation, trained.size, trained.state)
            clients.append((features(model, images), labels))
        for stage, (distance, pairs) in stage_distances(clients).items():
            rows.append((run, server.round_number, stage, distance, pairs))
    if not rows:
        raise MotleyError(
            "no two clients of a round have a class in common and features of the same shape."
        )
    return Findings(("run", "round", "stage", "distance", "pairs"), rows, _draw(rows))


def stage_distances(
    clients: Sequence[tuple[dict[str, Tensor], Tensor]],
) -> dict[str, tuple[float, int]]:
    """Return the mean distance per stage over pairs of clients, and the number of pairs."""
    distances: dict[str, list[float]] = {}
    for (one, labels), (other, other_labels) in combinations(clients, 2):
        if not set(labels.tolist()) & set(other_labels.tolist()):
            continue
        for stage in one:
            if stage in other and one[stage].shape[1:] == other[stage].shape[1:]:
                distance = conditional_wasserstein(one[stage], labels, other[stage], other_labels)
                distances.setdefault(stage, []).append(distance)
    return {stage: (mean(values), len(values)) for stage, values in distances.items()}


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    figure = new_figure(8, 4)
    axis = figure.subplots()
    curves: dict[str, list[tuple[int, float]]] = {}
    for run, number, stage, distance, _ in rows:
        curves.setdefault(f"{run}, {stage}", []).append((number, distance))
    for label, points in curves.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(
        title="features of a class, between clients",
        xlabel="round",
        ylabel="sliced Wasserstein distance",
    )
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
