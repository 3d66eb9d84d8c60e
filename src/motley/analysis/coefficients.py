"""InCo's coefficients over rounds: theta, beta, and how often beta is above zero (InCo, Figure 9a-c, Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.core.errors import MotleyError
from motley.runs.metrics import MetricsLog

DRAWN = {"theta": "theta", "beta": "beta", "positive": "share of beta > 0"}


@ANALYSES.register("coefficients", "InCo's theta and beta a layer over rounds")
def coefficients(paths: Sequence[Path]) -> Findings:
    """Read the metrics of runs; those without InCo are refused."""
    rows: list[tuple[Any, ...]] = []
    for path in paths:
        own = [
            (path.name, line["round"], layer, *(values[name] for name in DRAWN))
            for line in MetricsLog(path / "metrics.jsonl").read()
            for layer, values in line.get("inco", {}).items()
        ]
        if not own:
            raise MotleyError(f"{path} has no coefficients: it ran without InCo (method.inco.variant).")
        rows += own
    figure = new_figure(5 * len(DRAWN), 3.5 * len(paths))
    for line, path in zip(figure.subplots(len(paths), len(DRAWN), squeeze=False), paths, strict=True):
        own = [row for row in rows if row[0] == path.name]
        for number, (axis, title) in enumerate(zip(line, DRAWN.values(), strict=True), start=3):
            for layer in dict.fromkeys(row[2] for row in own):
                curve = [(row[1], row[number]) for row in own if row[2] == layer]
                axis.plot(*zip(*curve, strict=True), label=layer.removesuffix(".weight"), linewidth=1)
            axis.set(title=f"{path.name}: {title}", xlabel="round")
        line[-1].legend(fontsize=6)
    return Findings(("run", "round", "layer", "theta", "beta", "share of beta > 0"), rows, figure)
