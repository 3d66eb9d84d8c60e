"""What clients' changes look like, a layer (InCo, Figures 2 and 3): their distribution, and how alike two runs' are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.cka import linear_cka
from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.replay import kept_rounds, next_round
from motley.core.merge import merge
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.round import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


def quantiles(change: Tensor) -> list[float]:
    """Return the quantiles of a change's values."""
    values = change.double().flatten().sort().values
    places = [round(share * (len(values) - 1)) for share in QUANTILES]
    return values[places].tolist()


def mean_change(federation: Federation, server: Server) -> dict[str, Tensor]:
    """Return the mean change of the round after a server's, for weights of two dimensions and more."""
    updates = [
        ClientUpdate(
            client=one.client,
            part=federation.split.part(one.size, server.round_number + 1, one.client),
            delta=one.change,
        )
        for one in next_round(federation, server)
    ]
    change = merge(server.state, updates).delta
    return {name: tensor for name, tensor in change.items() if name in federation.split.parameters and tensor.dim() > 1}


@ANALYSES.register("gradients", "distributions of changes a layer over rounds, and how alike those of two runs are")
def gradients(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint that was kept; later runs are compared with the first, round by round."""
    rows: list[tuple[Any, ...]] = []
    first: dict[tuple[int, str], Tensor] = {}
    newest: dict[str, dict[str, Tensor]] = {}
    for run, federation, server in kept_rounds(paths):
        newest[run] = mean_change(federation, server)
        for layer, change in newest[run].items():
            other = first.setdefault((server.round_number, layer), change)
            alike = other is not change and other.shape == change.shape
            similar = linear_cka(other.flatten(1), change.flatten(1)) if alike else None
            spread = float(change.double().std())
            rows.append((run, server.round_number, layer, spread, *quantiles(change), similar))
    names = tuple(f"quantile {share:g}" for share in QUANTILES)
    columns = ("run", "round", "layer", "deviation", *names, "cka with the first run")
    return Findings(columns, rows, _draw(newest, rows))


def _draw(newest: dict[str, dict[str, Tensor]], rows: list[tuple[Any, ...]]) -> Figure:
    figure = new_figure(6 * len(newest) + 6, 4)
    *histograms, similar = figure.subplots(1, len(newest) + 1)
    for axis, (run, layers) in zip(histograms, newest.items(), strict=True):
        chosen = list(layers)[:: max(1, len(layers) // 6)]
        for layer in chosen:
            values = layers[layer].flatten()
            counts = torch.histogram(values.cpu().float(), bins=80)
            middle = (counts.bin_edges[1:] + counts.bin_edges[:-1]) / 2
            axis.plot(middle, counts.hist / counts.hist.max(), label=layer.removesuffix(".weight"), linewidth=1)
        axis.set(title=f"{run}: changes, newest checkpoint", xlabel="value", ylabel="share of the mode")
        axis.legend(fontsize=7)
    compared = [row for row in rows if row[-1] is not None]
    for run in dict.fromkeys(row[0] for row in compared):
        own = [row for row in compared if row[0] == run]
        own = [row for row in own if row[1] == own[-1][1]]
        similar.plot([row[2].removesuffix(".weight") for row in own], [row[-1] for row in own], ".-", label=run)
    similar.set(title="CKA of changes with the first run's", ylim=(0, 1.02))
    similar.tick_params(axis="x", rotation=90, labelsize=6)
    return figure
