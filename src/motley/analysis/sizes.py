"""Accuracy of every size over rounds (InCo, Figure 10e)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.analysis.findings import Findings, analysis, new_figure
from motley.runs.metrics import OVERALL, MetricsLog


@analysis("sizes", "accuracy of every size over rounds")
def sizes(paths: Sequence[Path]) -> Findings:
    """Read the accuracies from the runs' metrics."""
    rows: list[tuple[Any, ...]] = []
    figure = new_figure(5 * len(paths), 4)
    axes = figure.subplots(1, len(paths), squeeze=False, sharey=True)[0]
    for axis, path in zip(axes, paths, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for line in MetricsLog(path / "metrics.jsonl").read():
            for size, accuracy in line.get("accuracy", {}).items():
                rows.append((path.name, line["round"], size, accuracy))
                curves.setdefault(size, []).append((line["round"], 100 * accuracy))
        for size, points in curves.items():
            width = 3 if size == OVERALL else 1.2
            axis.plot(*zip(*points, strict=True), label=size, linewidth=width)
        axis.set(title=path.name, xlabel="round", ylabel="accuracy, %")
        axis.legend()
    return Findings(("run", "round", "size", "accuracy"), rows, figure)
