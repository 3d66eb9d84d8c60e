"""How far clients drift apart in a turn: their models' distance to the mean of them (FedImpro, Figures 2b, 3 and 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.replay import kept_rounds, next_round
from motley.core.part import State, add_at
from motley.federation import Federation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Models = Sequence[Mapping[str, Tensor]]
"""Parameters of clients' models under their global names. A model need not have all of them, nor all of one: what it
does not hold of a tensor is NaN there.
"""
WHOLE, LOW, HIGH = "all", "low level", "high level"
"""What the whole model and its two levels are called among layers."""


def weight_divergence(models: Models) -> float:
    """Return the mean over clients of |theta_i - mean theta|, each number's mean being over the models that have it."""
    squares = _squared_distances(models)
    return sum(sum(by_name.values()) ** 0.5 for by_name in squares) / len(models)


def layer_divergence(models: Models) -> dict[str, float]:
    """Return the same for each layer that two clients or more have, over those: weight and bias are one layer."""
    return {layer: sum(s**0.5 for s in squares) / len(squares) for layer, squares in layer_squares(models).items()}


def layer_squares(models: Models) -> dict[str, list[float]]:
    """Return, for each layer that two models or more have, their squared distances to its mean."""
    found: dict[str, list[float]] = {}
    for by_name in _squared_distances(models):
        layers: dict[str, float] = {}
        for name, square in by_name.items():
            layers[layer_of(name)] = layers.get(layer_of(name), 0.0) + square
        for layer, square in layers.items():
            found.setdefault(layer, []).append(square)
    return {layer: squares for layer, squares in found.items() if len(squares) > 1}


def _squared_distances(models: Models) -> list[dict[str, float]]:
    names = dict.fromkeys(name for model in models for name in model)
    means = {n: torch.stack([m[n].detach().double() for m in models if n in m]).nanmean(0) for n in names}
    return [{n: float((t.detach() - means[n]).square().nansum()) for n, t in model.items()} for model in models]


@ANALYSES.register("divergence", "how far clients drift apart in a turn, a layer and over rounds")
def divergence(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint that was kept, and compare its clients."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in kept_rounds(paths):
        number, trained = server.round_number + 1, next_round(federation, server)
        models = [placed(federation, one.size, number, one.client, one.state) for one in trained]
        layers = layer_divergence(models)
        found = {WHOLE: weight_divergence(models), **{n: layers[n] for n in in_order(federation, layers)}}
        rows += [(run, server.round_number, layer, value) for layer, value in found.items()]
    return Findings(("run", "round", "layer", "divergence"), rows, draw(rows, "mean distance to the mean"))


def placed(federation: Federation, size: str, round_number: int, client: int, values: State) -> State:
    """Return a value for each of a client's parameters under its global name, where it lies in the whole."""
    split = federation.split
    part, found = split.part(size, round_number, client), {}
    for local in sorted(split.parameters_of(size)):
        piece, tensor = part[local], values[local]
        if piece.index is not None:
            value, held = (torch.zeros(split.frame[piece.name].shape, device=tensor.device) for _ in range(2))
            add_at(value, piece.index, tensor)
            add_at(held, piece.index, 1.0)
            tensor = value.where(held > 0, torch.nan)
        found[piece.name] = tensor
    return found


def in_order(federation: Federation, layers: Mapping[str, float]) -> list[str]:
    """Return layers from the first to the last, as the size with the most of them has them."""
    split = federation.split
    sizes = sorted(split.sizes, key=lambda size: len(split.parameters_of(size)), reverse=True)
    parts = [(split.part(size), split.blueprints[size].module) for size in sizes]
    names = [part[local].name for part, module in parts for local, _ in module.named_parameters()]
    return [layer for layer in dict.fromkeys(layer_of(name) for name in names) if layer in layers]


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def draw(rows: list[tuple[Any, ...]], what: str) -> Figure:
    """Draw (run, round, layer, value): the whole and its levels over rounds, and the newest checkpoint's layers."""
    figure = new_figure(12, 4)
    over_rounds, a_layer = figure.subplots(1, 2)
    for run, color in zip(dict.fromkeys(row[0] for row in rows), cycle(f"C{number}" for number in range(10))):
        for part, style in ((WHOLE, "o-"), (LOW, ":"), (HIGH, "--")):
            some = [row for row in rows if row[0] == run and row[2] == part]
            if some:
                label = run if part == WHOLE else f"{run}, {part}"
                over_rounds.plot([row[1] for row in some], [row[3] for row in some], style, color=color, label=label)
        last = max(row[1] for row in rows if row[0] == run)
        newest = [row for row in rows if row[:2] == (run, last) and row[2] not in (WHOLE, LOW, HIGH)]
        a_layer.plot([row[2] for row in newest], [row[3] for row in newest], ".-", color=color, label=run)
    over_rounds.set(title="the whole model", xlabel="round", ylabel=what)
    a_layer.set(title="a layer, newest checkpoint")
    a_layer.tick_params(axis="x", rotation=90, labelsize=6)
    over_rounds.legend()
    return figure
