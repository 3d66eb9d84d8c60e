"""Accuracy of every size over rounds (InCo, Figure 10e)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.runs.metrics import MetricsLog


@ANALYSES.register("sizes", "accuracy of every size over rounds")
def sizes(paths: Sequence[Path]) -> Findings:
    """Read the metrics of runs."""
    rows = [
        (path.name, line["round"], size, accuracy)
        for path in paths
        for line in MetricsLog(path / "metrics.jsonl").read()
        for size, accuracy in line.get("accuracy", {}).items()
    ]
    figure = new_figure(5 * len(paths), 4)
    for axis, path in zip(figure.subplots(1, len(paths), squeeze=False, sharey=True)[0], paths, strict=True):
        own = [row for row in rows if row[0] == path.name]
        for size in dict.fromkeys(row[2] for row in own):
            curve = [(row[1], 100 * row[3]) for row in own if row[2] == size]
            axis.plot(*zip(*curve, strict=True), label=size, linewidth=3 if size == "mean" else 1.2)
        axis.set(title=path.name, xlabel="round", ylabel="accuracy, %")
        axis.legend()
    return Findings(("run", "round", "size", "accuracy"), rows, figure)
