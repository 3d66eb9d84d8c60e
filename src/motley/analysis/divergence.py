"""How far clients drift apart in a turn: the mean distance to their mean, a layer (FedImpro, Figures 2b, 3 and 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from motley.analysis import ANALYSES, Findings
from motley.analysis.replay import next_round, opened


def distance_to_mean(clients: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return for every tensor that two clients or more hold the mean over its holders of |mean - theta_i|."""
    found = {}
    for name in dict.fromkeys(name for one in clients for name in one):
        held = [one[name].double().flatten() for one in clients if name in one]
        if len(held) > 1:
            stacked = torch.stack(held)
            found[name] = float((stacked - stacked.mean(0)).norm(dim=1).mean())
    return found


@ANALYSES.register("divergence", "how far clients drift apart in a turn, a layer and over rounds")
def divergence(paths: Sequence[Path]) -> Findings:
    """Train the round after every checkpoint that was kept, and compare its clients."""
    rows: list[tuple[Any, ...]] = []
    for path in paths:
        with opened(path) as (federation, servers):
            for server in servers:
                trained = next_round(federation, server)
                parameters = [
                    {name: one.state[name] for name in federation.split.parameters_of(one.size)} for one in trained
                ]
                layers = distance_to_mean([dict(sorted(one.items())) for one in parameters])
                rows += [(path.name, server.round_number, layer, value) for layer, value in layers.items()]
    return Findings(("run", "round", "layer", "divergence"), rows, _draw(rows))


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    over_rounds, a_layer = figure.subplots(1, 2)
    for run in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == run]
        rounds = sorted({row[1] for row in own})
        totals = [math.sqrt(sum(row[3] ** 2 for row in own if row[1] == number)) for number in rounds]
        over_rounds.plot(rounds, totals, marker="o", label=run)
        newest = [row for row in own if row[1] == rounds[-1] and row[2].endswith("weight")]
        a_layer.plot([row[2].removesuffix(".weight") for row in newest], [row[3] for row in newest], ".-", label=run)
    over_rounds.set(title="all layers", xlabel="round", ylabel="mean distance to the mean")
    a_layer.set(title="a layer, newest checkpoint")
    a_layer.tick_params(axis="x", rotation=90, labelsize=6)
    over_rounds.legend()
    return figure
