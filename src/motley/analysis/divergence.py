"""Client drift: the distance of clients' models to their mean after a local update.

FedImpro, Section 5.1 and Figures 2b, 3 and 9:

    1 / |S| sum_{m in S} |theta_mean - theta_m|,    theta_mean = sum_m p_m theta_m / sum_m p_m

S are the clients of a round, and theta_mean is the server's average, whose weights p_m are the
clients' numbers of examples (Section 3.1). The outer mean is unweighted, as in the paper. The
divergence of a layer or of a stage is over its parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import all_checkpoints, train_next_round
from motley.core.errors import MotleyError, unknown
from motley.core.part import State, add_at
from motley.federation import Federation
from motley.models.facts import has_stages
from motley.models.stages import chain_of, owned
from motley.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def layer_divergence(
    models: Models, weights: Sequence[float], layers: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the divergence per layer, for layers that at least two clients have.

    Weight and bias count as one layer. `layers` groups parameters otherwise: parameter -> group.
    """
    divergences = {}
    for layer, squares in layer_squares(models, weights, layers).items():
        norms = [square**0.5 for square in squares.values()]
        divergences[layer] = sum(norms) / len(norms)
    return divergences


def layer_squares(
    models: Models, weights: Sequence[float], layers: Mapping[str, str] | None = None
) -> dict[str, dict[int, float]]:
    """Return the squared distances to the weighted mean per layer, of each model that has it.

    Models are given by their position in `models`. Layers that only one model has are left out.
    `layers` is the layer of every parameter; by default it is `layer_of`.
    """
    squares_by_layer: dict[str, dict[int, float]] = {}
    for position, squares in enumerate(_squared_distances(models, weights)):
        sums: dict[str, float] = {}
        for name, square in squares.items():
            layer = layer_of(name) if layers is None else layers[name]
            sums[layer] = sums.get(layer, 0.0) + square
        for layer, square in sums.items():
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
            # If no client holds a coordinate, 0 / 0 is NaN, and nansum leaves it out.
            mean = sums[name] / totals[name]
            squares[name] = float((tensor.detach() - mean).square().nansum())
        distances.append(squares)
    return distances


class DivergenceSettings(Settings):
    """Settings of the analysis `divergence`."""

    per: Literal["layer", "stage"] = "layer"
    """The parts of the model that are compared: single layers, or its declared stages."""
    curves: tuple[str, ...] = ()
    """The layers or stages whose divergence is drawn over rounds. Default: all stages with `per =
    "stage"`, no layers otherwise.
    """
    normalize: bool = False
    """Draw these curves divided by their maximum, as in FedImpro's Figure 3."""


@analysis(
    "divergence",
    "client drift in a local update, per layer or stage and over rounds",
    DivergenceSettings,
)
def divergence(paths: Sequence[Path], settings: DivergenceSettings) -> Findings:
    """Train the round after every checkpoint, and compare its clients."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        stages = stages_of_parameters(federation) if settings.per == "stage" else None
        round_number = server.round_number + 1
        models, weights = [], []
        for trained in train_next_round(federation, server):
            models.append(
                in_global_shape(
                    federation, trained.size, round_number, trained.client, trained.state
                )
            )
            weights.append(len(federation.partition.of(trained.client)))
        values = layer_divergence(models, weights, stages)
        names = layers_in_order(federation, values) if stages is None else _in_order(stages, values)
        rows.append((run, server.round_number, WHOLE, weight_divergence(models, weights)))
        for name in names:
            rows.append((run, server.round_number, name, values[name]))
    columns = ("run", "round", settings.per, "divergence")
    return Findings(columns, rows, _draw_with_curves(rows, settings))


def stages_of_parameters(federation: Federation) -> dict[str, str]:
    """Return the stage of every parameter of the global state, in the order of the stages."""
    split = federation.split
    chains = {}
    for size, blueprint in split.blueprints.items():
        if not has_stages(blueprint.module):
            raise MotleyError(
                f"divergence.per = 'stage': model {size!r} declares no stages "
                "(motley.models.spec). Allowed: 'layer'."
            )
        chains[size] = chain_of(blueprint.module)
    stages: dict[str, str] = {}
    # The longest chain comes first: it determines the order.
    for size in sorted(chains, key=lambda size: len(chains[size]), reverse=True):
        part, module = split.part(size), split.blueprints[size].module
        for stage in chains[size]:
            for local in owned(module, [stage]):
                stages[part[local].name] = stage.name
    return stages


def _in_order(stages: Mapping[str, str], values: Mapping[str, float]) -> list[str]:
    """Return the stages that have a value, in the order in which models declare them."""
    return [stage for stage in dict.fromkeys(stages.values()) if stage in values]


def _draw_with_curves(rows: list[tuple[Any, ...]], settings: DivergenceSettings) -> Figure:
    """Draw the two plots of `draw`, and one more of chosen layers or stages over rounds."""
    names = _names_of_curves(rows, settings)
    ylabel = "mean distance to the mean"
    if not names:
        return draw(rows, ylabel)
    figure = new_figure(18, 4)
    over_rounds, per_layer, curves_axis = figure.subplots(1, 3)
    draw_on(over_rounds, per_layer, rows, ylabel)
    _draw_curves(curves_axis, rows, names, settings.normalize)
    return figure


def _names_of_curves(rows: list[tuple[Any, ...]], settings: DivergenceSettings) -> Sequence[str]:
    """Return the layers or stages to draw over rounds: from the settings, or all stages."""
    present = list(dict.fromkeys(row[2] for row in rows if row[2] != WHOLE))
    for name in settings.curves:
        if name not in present:
            message = unknown(settings.per, name, present)
            raise MotleyError(f"divergence.curves = {name!r}: {message}")
    if settings.curves:
        return settings.curves
    return present if settings.per == "stage" else []


def _draw_curves(
    axis: Axes, rows: list[tuple[Any, ...]], names: Sequence[str], normalize: bool
) -> None:
    """Draw the divergence of some layers or stages over rounds, one curve per run and layer."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for run, number, layer, value in rows:
        curves.setdefault((run, layer), []).append((number, value))
    for run in dict.fromkeys(row[0] for row in rows):
        for name in names:
            if (run, name) in curves:
                numbers, values = zip(*curves[run, name], strict=True)
                scale = max(*values, 1e-12) if normalize else 1.0
                axis.plot(numbers, [value / scale for value in values], label=f"{run}, {name}")
    title = "over rounds, divided by the maximum" if normalize else "over rounds"
    axis.set(title=title, xlabel="round")
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


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
            shape = split.meta_state[piece.name].shape
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
    draw_on(over_rounds, per_layer, rows, ylabel)
    return figure


def draw_on(over_rounds: Axes, per_layer: Axes, rows: list[tuple[Any, ...]], ylabel: str) -> None:
    """Draw both plots of `draw` on given axes."""
    styles = {WHOLE: "o-", LOW: ":", HIGH: "--"}
    for position, run in enumerate(dict.fromkeys(row[0] for row in rows)):
        color = f"C{position % 10}"
        rows_of_run = [row[1:] for row in rows if row[0] == run]
        for part, style in styles.items():
            points = [(number, value) for number, layer, value in rows_of_run if layer == part]
            if points:
                label = run if part == WHOLE else f"{run}, {part}"
                over_rounds.plot(*zip(*points, strict=True), style, color=color, label=label)
        newest = max(number for number, _, _ in rows_of_run)
        layer_names, layer_values = [], []
        for number, layer, value in rows_of_run:
            if number == newest and layer not in styles:
                layer_names.append(layer)
                layer_values.append(value)
        per_layer.plot(layer_names, layer_values, ".-", color=color, label=run)
    over_rounds.set(title="whole model", xlabel="round", ylabel=ylabel)
    per_layer.set(title="per layer, newest checkpoint")
    per_layer.tick_params(axis="x", rotation=90, labelsize=6)
    over_rounds.legend()
