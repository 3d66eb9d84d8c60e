"""InCo's coefficients over rounds: theta, beta, and how often beta is positive.

InCo, Figure 9a-c and Table 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.analysis.findings import Findings, analysis, new_figure
from motley.core.errors import MotleyError
from motley.runs.metrics import MetricsLog, layer_metrics

#: The coefficients that are drawn -> their titles.
TITLES = {"theta": "theta", "beta": "beta", "positive": "share of beta > 0"}
#: The kinds of lines, in the order of their use.
STYLES = ("-", "--", ":", "-.")


@analysis("coefficients", "InCo's theta and beta per layer over rounds")
def coefficients(paths: Sequence[Path]) -> Findings:
    """Read the coefficients from the runs' metrics. Runs without InCo are rejected."""
    rows: list[tuple[Any, ...]] = []
    figure = new_figure(5 * len(TITLES), 3.5 * len(paths))
    axes = figure.subplots(len(paths), len(TITLES), squeeze=False)
    for axes_of_run, path in zip(axes, paths, strict=True):
        # Layer -> lists of the rounds and of each coefficient.
        curves: dict[str, dict[str, list[float | None]]] = {}
        for line in MetricsLog(path / "metrics.jsonl").read():
            for layer, values in layer_metrics(line, "inco").items():
                rows.append((path.name, line["round"], layer, *(values[name] for name in TITLES)))
                curve = curves.setdefault(layer, {name: [] for name in ("round", *TITLES)})
                curve["round"].append(line["round"])
                for name in TITLES:
                    curve[name].append(values[name])
        if not curves:
            raise MotleyError(
                f"{path} has no coefficients: it ran without InCo (server.inco.variant)."
            )
        for axis, (name, title) in zip(axes_of_run, TITLES.items(), strict=True):
            for number, (layer, curve) in enumerate(curves.items()):
                label = layer.removesuffix(".weight")
                # Ten colors are repeated, so every ten layers have another kind of line.
                style = STYLES[number // 10 % len(STYLES)]
                axis.plot(curve["round"], curve[name], style, label=label, linewidth=1)
            axis.set(title=f"{path.name}: {title}", xlabel="round")
        axes_of_run[-1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    return Findings(("run", "round", "layer", *TITLES.values()), rows, figure)
