"""Clients' deltas per layer: their distribution, and the similarity of two runs' deltas.

InCo, Figures 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.cka import linear_cka
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import all_checkpoints, train_next_round
from motley.core.merge import merge
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.server.state import ServerState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
#: Histograms are drawn of about this many layers, evenly spaced over the model.
LAYERS_DRAWN = 6


def quantiles(delta: Tensor) -> list[float]:
    """Return the quantiles of a delta's values."""
    values = delta.double().flatten().sort().values
    positions = [round(quantile * (len(values) - 1)) for quantile in QUANTILES]
    return values[positions].tolist()


def mean_delta(federation: Federation, server: ServerState) -> dict[str, Tensor]:
    """Return the merged delta of the round after `server`, for weights of several dimensions."""
    updates = []
    for trained in train_next_round(federation, server):
        part = federation.split.part(trained.size, server.round_number + 1, trained.client)
        updates.append(ClientUpdate(client=trained.client, part=part, delta=trained.delta))
    deltas = {}
    for name, delta in merge(server.state, updates).delta.items():
        if name in federation.split.parameters and delta.dim() > 1:
            deltas[name] = delta
    return deltas


@analysis(
    "gradients", "distribution of deltas per layer over rounds, and similarity of two runs' deltas"
)
def gradients(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint.

    Later runs are compared with the first, round by round.
    """
    rows: list[tuple[Any, ...]] = []
    first: dict[tuple[int, str], Tensor] = {}
    newest: dict[str, dict[str, Tensor]] = {}
    for run, federation, server in all_checkpoints(paths):
        newest[run] = mean_delta(federation, server)
        for layer, delta in newest[run].items():
            delta_of_first = first.setdefault((server.round_number, layer), delta)
            similarity = None
            if delta_of_first is not delta and delta_of_first.shape == delta.shape:
                similarity = linear_cka(delta_of_first.flatten(1), delta.flatten(1))
            std = float(delta.double().std())
            rows.append((run, server.round_number, layer, std, *quantiles(delta), similarity))
    names = [f"quantile {quantile:g}" for quantile in QUANTILES]
    columns = ("run", "round", "layer", "std", *names, "cka with the first run")
    return Findings(columns, rows, _draw(newest, rows))


def _draw(newest: dict[str, dict[str, Tensor]], rows: list[tuple[Any, ...]]) -> Figure:
    """Draw histograms of the newest deltas, one plot per run, and the similarity per layer."""
    figure = new_figure(6 * len(newest) + 6, 4)
    *histogram_axes, similarity_axis = figure.subplots(1, len(newest) + 1)
    for axis, (run, deltas) in zip(histogram_axes, newest.items(), strict=True):
        stride = max(1, len(deltas) // LAYERS_DRAWN)
        for layer in list(deltas)[::stride]:
            histogram = torch.histogram(deltas[layer].flatten().cpu().float(), bins=80)
            centers = (histogram.bin_edges[1:] + histogram.bin_edges[:-1]) / 2
            heights = histogram.hist / histogram.hist.max()
            axis.plot(centers, heights, label=layer.removesuffix(".weight"), linewidth=1)
        axis.set(
            title=f"{run}: deltas, newest checkpoint", xlabel="value", ylabel="relative frequency"
        )
        axis.legend(fontsize=7)
    # Run -> round -> (layer, similarity).
    compared: dict[str, dict[int, list[tuple[str, float]]]] = {}
    for run, number, layer, *_, similarity in rows:
        if similarity is not None:
            point = (layer.removesuffix(".weight"), similarity)
            compared.setdefault(run, {}).setdefault(number, []).append(point)
    for run, points_by_round in compared.items():
        points = points_by_round[max(points_by_round)]
        similarity_axis.plot(*zip(*points, strict=True), ".-", label=run)
    similarity_axis.set(title="CKA of deltas with those of the first run", ylim=(0, 1.02))
    similarity_axis.tick_params(axis="x", rotation=90, labelsize=6)
    return figure
