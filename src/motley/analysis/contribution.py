"""Generalization contribution of a client, FedImpro's Eq. 2, and its bound, Theorem 4.1.

    contribution(m) = E_{Delta: L(D_m)} W_d(rho(theta + Delta), D without D_m)             (Eq. 2)

theta is the model that client m receives in the round after a checkpoint, and theta + Delta its
model after the local update. W_d is the worst-case margin (`margin.py`). "D without D_m" are the
training examples of all other clients of the federation, together; so client k counts p_k = n_k/N.
The expectation over Delta is taken over one local update, the one that the run itself computed.
The column "received" has the margin of theta on the same examples, so that contribution - received
is the local update's contribution.

    contribution(m) >= W_d(training set of m) - |W_d(D_m) - W_d(training set of m)|
                       - 2 C_d(D_m, D without D_m)                                   (Theorem 4.1)

All margins are those of theta + Delta. D_m is estimated by test examples, weighted by the class
frequencies of client m: in a federation without test data of each client, these are new examples
of its distribution as far as clients differ in their labels only. C_d is the conditional
Wasserstein distance (Definition 4.1) with the exact distance between as many examples of m and of
the others, per class; the sliced distance of `wasserstein.py` would be too small for a bound.

The theorem holds if all clients have the same label distribution. Otherwise the proof has another
term on the right-hand side, - max(delta, gamma) (Eq. 11), the column "label term":

    delta = E_{y ~ D_m} margin(others | y) - E_{y ~ others} margin(others | y)
    gamma = E_{y ~ others} margin(D_m | y) - E_{y ~ D_m} margin(D_m | y)

The paper prints D_m | y in delta's second expectation; its derivation has the others there. Classes
that client m or the sampled others lack are left out of C_d, delta and gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from motley.analysis.assignment import exact_wasserstein
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.margin import (
    MarginSettings,
    frozen,
    in_batches,
    layers_of_sizes,
    margins,
    mean_margin,
)
from motley.analysis.replay import (
    TrainedClient,
    all_checkpoints,
    examples_at,
    log,
    model_of,
    sampled_rows,
    train_next_round,
)
from motley.federation import Federation
from motley.server.state import ServerState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The client of rows that are means over a round's clients, weighted by their examples.
ALL = "all"
#: The columns with numbers, in order.
NUMBERS = (
    "contribution",
    "received",
    "training margin",
    "own margin",
    "distance",
    "label term",
    "bound",
    "not found",
)


@dataclass(frozen=True)
class Labelled:
    """Examples at a layer: inputs of the part of the model behind it, labels and margins."""

    inputs: Tensor
    labels: Tensor
    margins: Tensor


def conditional_distance(one: Labelled, other: Labelled) -> float:
    """Return C_d (Definition 4.1) with the exact Wasserstein distance.

    Of each class, the first n examples of both sides are compared, where n is the smaller count. It
    is NaN if there is no class that both have.
    """
    distances = {}
    for label in common_classes(one, other):
        of_class = one.inputs[one.labels == label]
        others_of_class = other.inputs[other.labels == label]
        count = min(len(of_class), len(others_of_class))
        distances[label] = exact_wasserstein(of_class[:count], others_of_class[:count])
    expectations = [_expectation(distances, one.labels), _expectation(distances, other.labels)]
    return sum(expectations) / 2


def label_term(one: Labelled, other: Labelled) -> float:
    """Return max(delta, gamma) of Eq. 11, where `one` are the examples of D_m."""
    own_margins, other_margins = {}, {}
    for label in common_classes(one, other):
        own_margins[label] = mean_margin(one.margins[one.labels == label])[0]
        other_margins[label] = mean_margin(other.margins[other.labels == label])[0]
    delta = _expectation(other_margins, one.labels) - _expectation(other_margins, other.labels)
    gamma = _expectation(own_margins, other.labels) - _expectation(own_margins, one.labels)
    return max(delta, gamma)


def common_classes(one: Labelled, other: Labelled) -> list[int]:
    """Return the classes that both sides have examples of."""
    return sorted(set(one.labels.tolist()) & set(other.labels.tolist()))


def _expectation(values: dict[int, float], labels: Tensor) -> float:
    """Return the mean of a value per class, weighted by how often the classes occur in `labels`."""
    counts = {label: int((labels == label).sum()) for label in values}
    total = sum(counts.values())
    if not total:
        return float("nan")
    return sum(counts[label] * value for label, value in values.items()) / total


def class_weights(labels: Tensor, like: Tensor, classes: int) -> Tensor:
    """Return one weight per label, so that classes count as often as they occur in `like`."""
    wanted = torch.bincount(like, minlength=classes).double() / len(like)
    given = torch.bincount(labels, minlength=classes).double() / len(labels)
    return (wanted / given.clamp(min=1e-12))[labels]


@analysis(
    "contribution",
    "generalization contribution of clients over rounds: margins on the others' examples, and "
    "the bound on them",
    MarginSettings,
)
def contribution(paths: Sequence[Path], settings: MarginSettings) -> Findings:
    """Train the round after every checkpoint, and compute the contribution of its clients."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        layers_of_size = layers_of_sizes(federation, settings.layers, "contribution.layers")
        clients = train_next_round(federation, server)
        per_layer: dict[str, list[tuple[int, list[float]]]] = {}
        for trained in clients:
            log.info("%s: round %d, client %d", run, server.round_number + 1, trained.client)
            for layer in layers_of_size[trained.size]:
                numbers = of_client(federation, server, trained, layer, settings)
                rows.append(
                    (run, server.round_number, trained.client, trained.size, layer, *numbers)
                )
                weight = len(federation.partition.of(trained.client))
                per_layer.setdefault(layer, []).append((weight, numbers))
        for layer, weighted in per_layer.items():
            rows.append((run, server.round_number, ALL, ALL, layer, *_means(weighted)))
    columns = ("run", "round", "client", "size", "layer", *NUMBERS)
    return Findings(columns, rows, _draw(rows))


def of_client(
    federation: Federation,
    server: ServerState,
    trained: TrainedClient,
    layer: str,
    settings: MarginSettings,
) -> list[float]:
    """Return the numbers of one client at one layer, in the order of `NUMBERS`."""
    client, size = trained.client, trained.size
    seed, count = federation.config.seed, settings.examples
    data = federation.dataset
    own_rows = federation.partition.of(client)
    is_own = np.isin(federation.partition.indices, own_rows)
    other_rows = federation.partition.indices[~is_own]
    own_examples = examples_at(
        federation, data.train, sampled_rows(own_rows, count, seed, "own", client)
    )
    others = examples_at(
        federation, data.train, sampled_rows(other_rows, count, seed, "others", client)
    )
    test = examples_at(
        federation, data.test, sampled_rows(np.arange(len(data.test)), count, seed, "test")
    )
    received_state = federation.job(server, server.round_number + 1, client).state
    received = labelled(model_of(federation, size, received_state), layer, *others, settings)
    model = model_of(federation, size, trained.state)
    return theorem_terms(
        received=received,
        training=labelled(model, layer, *own_examples, settings),
        others=labelled(model, layer, *others, settings),
        test=labelled(model, layer, *test, settings),
        classes=data.classes,
    )


def labelled(
    model: nn.Module, layer: str, images: Tensor, labels: Tensor, settings: MarginSettings
) -> Labelled:
    """Return the features of images at a layer, with their labels and margins."""
    low, high = frozen(model, layer, "contribution.layers")
    inputs = in_batches(low, images)
    distances = margins(high, inputs, labels, steps=settings.steps, candidates=settings.candidates)
    return Labelled(inputs, labels, distances)


def theorem_terms(
    *, received: Labelled, training: Labelled, others: Labelled, test: Labelled, classes: int
) -> list[float]:
    """Return the terms of Eq. 2 and Theorem 4.1, in the order of `NUMBERS`.

    `received` are the others' examples at the received model; all else is at the trained one.
    """
    contribution, not_found = mean_margin(others.margins)
    before, _ = mean_margin(received.margins)
    training_margin, _ = mean_margin(training.margins)
    weights = class_weights(test.labels, training.labels, classes)
    own_margin, _ = mean_margin(test.margins, weights)
    distance = conditional_distance(training, others)
    bound = training_margin - abs(own_margin - training_margin) - 2 * distance
    return [
        contribution,
        before,
        training_margin,
        own_margin,
        distance,
        label_term(training, others),
        bound,
        not_found,
    ]


def _means(weighted: list[tuple[int, list[float]]]) -> list[float]:
    """Return the means of several clients' numbers, weighted by the clients' examples."""
    weights = torch.tensor([weight for weight, _ in weighted], dtype=torch.float64)
    numbers = torch.tensor([values for _, values in weighted], dtype=torch.float64)
    # A number is NaN if a client has no class in common with the others.
    known = weights[:, None] * ~numbers.isnan()
    means = (known * numbers.nan_to_num()).sum(0) / known.sum(0)
    return [float(mean) for mean in means]


#: The numbers that are drawn -> their line styles. The bound is drawn apart: in many dimensions it
#: is far below the margins.
MARGIN_STYLES = {"contribution": "o-", "received": "s--", "training margin": "^:"}
BOUND_STYLES = {"bound": "v-", "distance": "x--"}


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    """Draw the means of the clients' numbers over rounds: margins above, the bound below."""
    means: dict[str, list[tuple[Any, ...]]] = {}  # by layer
    for row in rows:
        _run, _round, client, _size, layer = row[:5]
        if client == ALL:
            means.setdefault(layer, []).append(row)
    figure = new_figure(5 * len(means) + 2, 7)
    axes = figure.subplots(2, len(means), squeeze=False)
    for column, (layer, rows_of_layer) in enumerate(means.items()):
        _draw_curves(axes[0, column], rows_of_layer, MARGIN_STYLES)
        _draw_curves(axes[1, column], rows_of_layer, BOUND_STYLES)
        axes[0, column].set(title=f"margins at {layer}", ylabel="Euclidean distance")
        axes[1, column].set(title=f"bound at {layer} (Theorem 4.1)", xlabel="round")
    for axis in axes[:, -1]:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_curves(axis: Axes, rows: list[tuple[Any, ...]], styles: dict[str, str]) -> None:
    """Draw one curve per run and number."""
    for color, run in enumerate(dict.fromkeys(row[0] for row in rows)):
        for name, style in styles.items():
            position = 5 + NUMBERS.index(name)
            points = [(row[1], row[position]) for row in rows if row[0] == run]
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, style, color=f"C{color % 10}", label=f"{run}, {name}")
