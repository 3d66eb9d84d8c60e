"""The score of every size over rounds; accuracy in InCo, Figure 10e."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.analysis.findings import Findings, analysis, new_figure
from motley.core.errors import MotleyError
from motley.runs.metrics import ACCURACY, OVERALL, MetricsLog, metric_of, scores_of
from motley.tasks import MetricInfo


@analysis("sizes", "score of every size over rounds")
def sizes(paths: Sequence[Path]) -> Findings:
    """Read the scores from the runs' metrics."""
    rows: list[tuple[Any, ...]] = []
    names: set[str] = set()
    figure = new_figure(5 * len(paths), 4)
    axes = figure.subplots(1, len(paths), squeeze=False, sharey=True)[0]
    for axis, path in zip(axes, paths, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        metric: MetricInfo = ACCURACY
        for line in MetricsLog(path / "metrics.jsonl").read():
            metric = metric_of([line])
            for size, value in scores_of(line).items():
                rows.append((path.name, line["round"], size, value))
                curves.setdefault(size, []).append((line["round"], metric.scaled(value)))
        if not curves:
            raise MotleyError(f"{path} has no evaluated round.")
        for size, points in curves.items():
            width = 3 if size == OVERALL else 1.2
            axis.plot(*zip(*points, strict=True), label=size, linewidth=width)
        axis.set(title=path.name, xlabel="round", ylabel=metric.label)
        axis.legend()
        names.add(metric.name)
    # One column for all runs: their metric's name, if they have the same one.
    column = names.pop() if len(names) == 1 else "score"
    return Findings(("run", "round", "size", column), rows, figure)
