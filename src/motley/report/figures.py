"""The report's pictures, as plotly figures without colours of their own: the page gives them its theme."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from plotly import graph_objects as go

from motley.data import load_dataset
from motley.federation import deal
from motley.report.material import Panel, Run, Series

PALETTE = ("#3366cc", "#dc6912", "#109618", "#b82e9e", "#0099c6", "#c9a100", "#dd4477", "#66aa00")
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_CLIENTS = 200
"""How many clients the picture of a partition shows."""


def style(number: int) -> dict[str, Any]:
    """Return the line of a series: a colour, and another dash where colours begin again."""
    return {"color": PALETTE[number % len(PALETTE)], "dash": DASHES[number // len(PALETTE) % len(DASHES)], "width": 2}


def accuracy(panel: Panel, size: str, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy over rounds: the mean over seeds, and a band of one deviation where there are several."""
    figure = go.Figure()
    for label, series in panel.series.items():
        if any(size in line["accuracy"] for run in series.runs for line in run.evaluated):
            _curve(figure, series, size, style(labels.index(label)))
    title = "mean over sizes" if size == "mean" else size
    figure.update_layout(title=f"accuracy, {title}", xaxis_title="round", yaxis_title="%")
    return figure


def _curve(figure: go.Figure, series: Series, size: str, line: dict[str, Any]) -> None:
    rounds, values = series.curve(size)
    means = [round(fmean(row), 2) for row in values]
    if len(series.runs) > 1:
        spreads = [stdev(row) for row in values]
        upper = [round(m + s, 2) for m, s in zip(means, spreads, strict=True)]
        lower = [round(m - s, 2) for m, s in zip(means, spreads, strict=True)]
        figure.add_scatter(
            x=[*rounds, *reversed(rounds)],
            y=[*upper, *reversed(lower)],
            fill="toself",
            mode="none",
            fillcolor=line["color"],
            opacity=0.18,
            hoverinfo="skip",
            showlegend=False,
            legendgroup=series.label,
        )
    seeds = f"{len(series.runs)} seeds" if len(series.runs) > 1 else "one seed"
    figure.add_scatter(
        x=rounds,
        y=means,
        mode="lines",
        line=line,
        name=series.label,
        legendgroup=series.label,
        hovertemplate=f"%{{y:.1f}} % ({seeds})",
    )


def traffic(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy against what was sent, for the first seed of every series."""
    figure = go.Figure()
    for label, series in panel.series.items():
        run, sent, xs, ys = series.runs[0], 0.0, [], []
        for line in run.lines:
            sent += (line["bytes"]["down"] + line["bytes"]["up"]) / 1e6
            if "accuracy" in line:
                xs.append(round(sent, 3))
                ys.append(round(100 * line["accuracy"]["mean"], 2))
        line_style = style(labels.index(label))
        figure.add_scatter(x=xs, y=ys, mode="lines", line=line_style, name=label, legendgroup=label)
    figure.update_layout(title="accuracy against traffic", xaxis_title="MB sent, down and up", yaxis_title="%")
    return figure


def coefficients(series: Series, name: str) -> go.Figure | None:
    """Draw one of InCo's coefficients for every layer over rounds, for the first seed; None where InCo was off."""
    lines = [line for line in series.runs[0].lines if line.get("inco")]
    if not lines:
        return None
    figure = go.Figure()
    for number, layer in enumerate(dict.fromkeys(layer for line in lines for layer in line["inco"])):
        rows = [line for line in lines if layer in line["inco"]]
        rounds, values = [line["round"] for line in rows], [line["inco"][layer][name] for line in rows]
        figure.add_scatter(x=rounds, y=values, mode="lines", line=style(number), name=layer.removesuffix(".weight"))
    figure.update_layout(title=f"{series.label}: {NAMES[name]}", xaxis_title="round")
    return figure


def own_numbers(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw what methods report of themselves, a figure for each number over rounds, for the first seed of a series."""
    drawn: dict[str, go.Figure] = {}
    for label, series in panel.series.items():
        lines = [line for line in series.runs[0].lines if line.get("method")]
        for name in dict.fromkeys(name for line in lines for name in line["method"]):
            rows = [line for line in lines if name in line["method"]]
            figure = drawn.setdefault(name, go.Figure())
            rounds, values = [line["round"] for line in rows], [line["method"][name] for line in rows]
            look = {"mode": "lines", "line": style(labels.index(label)), "name": label, "legendgroup": label}
            figure.add_scatter(x=rounds, y=values, **look)
    for name, figure in drawn.items():
        figure.update_layout(title=f"the method's own: {name.replace('_', ' ')}", xaxis_title="round")
    return list(drawn.values())


NAMES = {"theta": "theta a layer", "positive": "share of beta > 0 a layer"}
"""The coefficients that are drawn."""


def partition(run: Run) -> go.Figure:
    """Draw how many examples of every class each client holds. Raises MotleyError where the data set is not here."""
    config = run.config
    dataset = load_dataset(config.data.name, root=config.data.root_path, path=config.data.file_path)
    counts = deal(config, dataset).label_counts(dataset.train.labels, dataset.classes)[:MOST_CLIENTS]
    figure = go.Figure(go.Heatmap(z=counts.T.tolist(), colorscale="Viridis", colorbar={"title": "examples"}))
    figure.update_traces(hovertemplate="client %{x}, class %{y}: %{z} examples<extra></extra>")
    first = f", the first {MOST_CLIENTS}" if config.federation.clients > MOST_CLIENTS else ""
    figure.update_layout(title=f"who holds what (seed {config.seed}{first})", xaxis_title="client", yaxis_title="class")
    return figure
