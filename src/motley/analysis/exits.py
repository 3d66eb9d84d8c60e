"""Accuracy and cost of models whose examples leave at early exits, over confidence thresholds.

MSDNet (Huang et al., ICLR 2018) calls this anytime and budgeted classification. The cost is the
mean number of floating-point operations per example, relative to the network without early exits;
it includes the heads of all exits on the way, so a threshold that no example reaches costs more
than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import log, open_run
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.settings import Settings
from motley.splits.early_exit import choose_exits, exit_costs, exits_of
from motley.splits.exits import WithExits

Threshold = Annotated[float, Field(gt=0, le=1)]


class ExitSettings(Settings):
    """The thresholds."""

    thresholds: tuple[Threshold, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
    """Confidences at which examples leave: the largest class probability of an exit."""


@analysis(
    "exits",
    "accuracy and cost of early exits over confidence thresholds",
    ExitSettings,
    classes=True,
)
def exits(paths: Sequence[Path], settings: ExitSettings | None = None) -> Findings:
    """Evaluate the last checkpoint of each run, every size that has early exits.

    A threshold of 0 stands for the network without early exits.
    """
    thresholds = (settings or ExitSettings()).thresholds
    rows: list[tuple[Any, ...]] = []
    figure = new_figure(6 * len(paths), 4)
    all_axes = figure.subplots(1, len(paths), squeeze=False, sharey=True)[0]
    for axes, path in zip(all_axes, paths, strict=True):
        with open_run(path) as (federation, servers):
            for size in federation.split.sizes:
                model = federation.model(size, servers[-1])
                if not isinstance(model, WithExits) or len(model.cuts) < 2:
                    continue
                log.info("evaluating the exits of %s", size)
                size_rows = _rows(federation, model, thresholds)
                rows += [(path.name, servers[-1].round_number, size, *row) for row in size_rows]
                curve = sorted((100 * row[2], 100 * row[1]) for row in size_rows[1:])
                (line,) = axes.plot(*zip(*curve, strict=True), marker=".", label=size)
                full_accuracy = 100 * size_rows[0][1]
                axes.axhline(full_accuracy, color=line.get_color(), linestyle=":", linewidth=1)
        if not any(row[0] == path.name for row in rows):
            raise MotleyError(
                f"the analysis exits: the models of {path} have no early exits. Those of "
                "split.name = 'grid' (ScaleFL, DepthFL) have."
            )
        axes.set(title=path.name, xlabel="cost, % of the full network", ylabel="accuracy, %")
        axes.legend()
    columns = ("run", "round", "size", "threshold", "accuracy", "cost", "mean_exit", "exit_shares")
    return Findings(columns, rows, figure)


def _rows(
    federation: Federation, model: WithExits, thresholds: Sequence[float]
) -> list[tuple[float, float, float, float, str]]:
    """Return threshold, accuracy, cost, mean exit and the shares of the exits.

    The first row is the network without early exits.
    """
    exits_of(model, "the analysis exits")
    exit_logits, labels = _all_exit_logits(federation, model)
    costs = exit_costs(model, next(iter(federation.evaluator.batches))[0][:1])
    last = len(model.cuts)
    full = choose_exits(exit_logits, float("inf"), model.ensemble)
    shares = ";".join(["0"] * (last - 1) + ["1"])
    rows = [(0.0, _accuracy(full.logits, labels), 1.0, float(last), shares)]
    for threshold in thresholds:
        outputs = choose_exits(exit_logits, threshold, model.ensemble)
        counts = torch.bincount(outputs.exits, minlength=last) / len(labels)
        rows.append(
            (
                threshold,
                _accuracy(outputs.logits, labels),
                costs.mean_fraction(outputs.exits),
                float(outputs.exits.float().mean()) + 1,
                ";".join(f"{share:.4g}" for share in counts.tolist()),
            )
        )
    return rows


@torch.no_grad()
def _all_exit_logits(federation: Federation, model: WithExits) -> tuple[list[Tensor], Tensor]:
    """Return the logits of all exits on the whole test set, and the labels."""
    batches, all_labels = [], []
    with federation.numerics():
        for inputs, labels in federation.evaluator.batches:
            batches.append(model.exit_logits(inputs))
            all_labels.append(labels)
    return [torch.cat(logits) for logits in zip(*batches, strict=True)], torch.cat(all_labels)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())
