"""Client drift: the distance of clients' models to their mean after a local update.

FedImpro, Section 5.1 and Figures 2b, 3 and 9:

    1 / |S| sum_{m in S} |theta_mean - theta_m|,    theta_mean = sum_m p_m theta_m / sum_m p_m

S are the clients of a round, and theta_mean is the server's average, whose weights p_m are the
clients' numbers of examples (Section 3.1). The outer mean is unweighted, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import all_checkpoints, train_next_round
from motley.core.part import State, add_at
from motley.federation import Federation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The parameters of clients' models under their global names. A model need not have all parameters.
#: Coordinates of a parameter that a client does not hold are NaN.
Models = Sequence[Mapping[str, Tensor]]
#: Names that stand for the whole model and its two levels in the column of layers.
WHOLE, LOW, HIGH = "all", "low level", "high level"


def weight_divergence(models: Models, weights: Sequence[float]) -> float:
    """Return the mean over clients of |theta_m - theta_mean|.

    `weights` are the clients' p_m; they need not sum to 1. The mean of each coordinate is over the
    models that hold it.
    """
    norms = [sum(squares.values()) ** 0.5 for squares in _squared_distances(models, weights)]
    return sum(norms) / len(models)


def layer_divergence(models: Models, weights: Sequence[float]) -> dict[str, float]:
    """Return the divergence per layer, for layers that at least two clients have.

    Weight and bias count as one layer.
    """
    divergences = {}
    for layer, squares in layer_squares(models, weights).items():
        norms = [square**0.5 for square in squares.values()]
        divergences[layer] = sum(norms) / len(norms)
    return divergences


def layer_squares(models: Models, weights: Sequence[float]) -> dict[str, dict[int, float]]:
    """Return the squared distances to the weighted mean per layer, of each model that has it.

    Models are given by their position in `models`. Layers that only one model has are left out.
    """
    squares_by_layer: dict[str, dict[int, float]] = {}
    for position, squares in enumerate(_squared_distances(models, weights)):
        layers: dict[str, float] = {}
        for name, square in squares.items():
            layer = layer_of(name)
            layers[layer] = layers.get(layer, 0.0) + square
        for layer, square in layers.items():
            squares_by_layer.setdefault(layer, {})[position] = square
    return {layer: squares for layer, squares in squares_by_layer.items() if len(squares) > 1}


def _squared_distances(models: Models, weights: Sequence[float]) -> list[dict[str, float]]:
    """Return each model's squared distance to the weighted mean, per parameter."""
    sums: dict[str, Tensor] = {}
    totals: dict[str, Tensor] = {}
    for model, weight in zip(models, weights, strict=True):
        for name, tensor in model.items():
            value = tensor.detach().double()
            if name not in sums:
                sums[name] = torch.zeros_like(value)
                totals[name] = torch.zeros_like(value)
            is_missing = value.isnan()
            sums[name] += weight * value.masked_fill(is_missing, 0)
            totals[name] += weight * ~is_missing
    distances = []
    for model in models:
        squares = {}
        for name, tensor in model.items():
            # Where nobody holds a coordinate, 0 / 0 is NaN and is left out by nansum.
            mean = sums[name] / totals[name]
            squares[name] = float((tensor.detach() - mean).square().nansum())
        distances.append(squares)
    return distances


@analysis("divergence", "client drift in a local update, per layer and over rounds")
def divergence(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint, and compare its clients."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        round_number = server.round_number + 1
        models, weights = [], []
        for trained in train_next_round(federation, server):
            models.append(
                in_global_shape(
                    federation, trained.size, round_number, trained.client, trained.state
                )
            )
            weights.append(len(federation.partition.of(trained.client)))
        layers = layer_divergence(models, weights)
        rows.append((run, server.round_number, WHOLE, weight_divergence(models, weights)))
        for layer in layers_in_order(federation, layers):
            rows.append((run, server.round_number, layer, layers[layer]))
    columns = ("run", "round", "layer", "divergence")
    return Findings(columns, rows, draw(rows, "mean distance to the mean"))


def in_global_shape(
    federation: Federation, size: str, round_number: int, client: int, values: State
) -> State:
    """Return one tensor per parameter of a client under its global name and in its global shape.

    Coordinates that the client does not hold are NaN.
    """
    split = federation.split
    part = split.part(size, round_number, client)
    result = {}
    for local in sorted(split.parameters_of(size)):
        piece, tensor = part[local], values[local]
        if piece.index is not None:
            shape = split.frame[piece.name].shape
            value = torch.zeros(shape, device=tensor.device)
            count = torch.zeros(shape, device=tensor.device)
            add_at(value, piece.index, tensor)
            add_at(count, piece.index, 1.0)
            tensor = value.where(count > 0, torch.nan)
        result[piece.name] = tensor
    return result


def layers_in_order(federation: Federation, layers: Mapping[str, float]) -> list[str]:
    """Return the names of layers from first to last, in the order of the deepest size."""
    split = federation.split
    sizes = sorted(split.sizes, key=lambda size: len(split.parameters_of(size)), reverse=True)
    ordered: dict[str, None] = {}
    for size in sizes:
        part = split.part(size)
        for local, _ in split.blueprints[size].module.named_parameters():
            ordered[layer_of(part[local].name)] = None
    return [layer for layer in ordered if layer in layers]


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def draw(rows: list[tuple[Any, ...]], ylabel: str) -> Figure:
    """Draw rows of (run, round, layer, value).

    The left plot shows the whole model and its levels over rounds, the right plot the layers at the
    newest checkpoint.
    """
    figure = new_figure(12, 4)
    over_rounds, per_layer = figure.subplots(1, 2)
    colors = cycle(f"C{number}" for number in range(10))
    styles = {WHOLE: "o-", LOW: ":", HIGH: "--"}
    for run in dict.fromkeys(row[0] for row in rows):
        color = next(colors)
        # Whole model or level -> (round, value); and, of the newest checkpoint, (layer, value).
        curves: dict[str, list[tuple[int, float]]] = {}
        newest: list[tuple[str, float]] = []
        last = max(row[1] for row in rows if row[0] == run)
        for other_run, number, layer, value in rows:
            if other_run != run:
                continue
            if layer in styles:
                curves.setdefault(layer, []).append((number, value))
            elif number == last:
                newest.append((layer, value))
        for part, style in styles.items():
            if part in curves:
                label = run if part == WHOLE else f"{run}, {part}"
                points = zip(*curves[part], strict=True)
                over_rounds.plot(*points, style, color=color, label=label)
        layer_names = [layer for layer, _ in newest]
        layer_values = [value for _, value in newest]
        per_layer.plot(layer_names, layer_values, ".-", color=color, label=run)
    over_rounds.set(title="whole model", xlabel="round", ylabel=ylabel)
    per_layer.set(title="per layer, newest checkpoint")
    per_layer.tick_params(axis="x", rotation=90, labelsize=6)
    over_rounds.legend()
    return figure
