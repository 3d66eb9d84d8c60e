"""Client drift: the distance of clients' models to their mean after a local update.

FedImpro, Figures 2b, 3 and 9.
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


def weight_divergence(models: Models) -> float:
    """Return the mean over clients of |theta_i - mean theta|.

    The mean of each coordinate is over the models that hold it.
    """
    norms = [sum(squares.values()) ** 0.5 for squares in _squared_distances(models)]
    return sum(norms) / len(models)


def layer_divergence(models: Models) -> dict[str, float]:
    """Return the divergence per layer, for layers that at least two clients have.

    Weight and bias count as one layer.
    """
    divergences = {}
    for layer, squares in layer_squares(models).items():
        norms = [square**0.5 for square in squares]
        divergences[layer] = sum(norms) / len(norms)
    return divergences


def layer_squares(models: Models) -> dict[str, list[float]]:
    """Return the squared distances to the mean per layer, one for each model that has the layer.

    Layers that only one model has are left out.
    """
    squares_by_layer: dict[str, list[float]] = {}
    for squares in _squared_distances(models):
        layers: dict[str, float] = {}
        for name, square in squares.items():
            layer = layer_of(name)
            layers[layer] = layers.get(layer, 0.0) + square
        for layer, square in layers.items():
            squares_by_layer.setdefault(layer, []).append(square)
    return {layer: squares for layer, squares in squares_by_layer.items() if len(squares) > 1}


def _squared_distances(models: Models) -> list[dict[str, float]]:
    """Return each model's squared distance to the mean, per parameter."""
    values: dict[str, list[Tensor]] = {}
    for model in models:
        for name, tensor in model.items():
            values.setdefault(name, []).append(tensor.detach().double())
    means = {name: torch.stack(tensors).nanmean(0) for name, tensors in values.items()}
    distances = []
    for model in models:
        squares = {}
        for name, tensor in model.items():
            squares[name] = float((tensor.detach() - means[name]).square().nansum())
        distances.append(squares)
    return distances


@analysis("divergence", "client drift in a local update, per layer and over rounds")
def divergence(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint, and compare its clients."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        round_number = server.round_number + 1
        models = []
        for trained in train_next_round(federation, server):
            models.append(
                in_global_shape(
                    federation, trained.size, round_number, trained.client, trained.state
                )
            )
        layers = layer_divergence(models)
        rows.append((run, server.round_number, WHOLE, weight_divergence(models)))
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
