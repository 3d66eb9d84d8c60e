"""The report's figures, as plotly figures without a theme of their own: the page gives them its colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from plotly import graph_objects as go

from motley.assembly import deal_examples
from motley.data import load_dataset
from motley.report.material import Panel, Run, Series
from motley.runs.metrics import layer_numbers, stage_numbers

#: Colours that can be told apart on a light and on a dark page.
PALETTE = (
    *("#3f75d6", "#e8710a", "#1a9c3f", "#a445c9", "#00a3bf"),
    *("#c9a100", "#dc3545", "#e66fb4", "#a5714f", "#808b96"),
)
#: Dashes of plotly, and the same as an SVG stroke-dasharray for the legend.
DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "8 3 2 3"}
#: The heat map of a partition shows at most this many clients.
MOST_CLIENTS = 200
#: Up to this many rounds every round has a tick. Plotly would put ticks at 1.5 rounds otherwise.
EVERY_ROUND_TICKED = 12
#: InCo's coefficients that are drawn, and their titles.
COEFFICIENTS = {"theta": "theta per layer", "positive": "share of beta > 0 per layer"}


def style(number: int) -> dict[str, Any]:
    """Return the line style of a series: a colour, and another dash for each time the colours are used up."""
    dashes = list(DASHES)
    dash = dashes[number // len(PALETTE) % len(dashes)]
    return {"color": PALETTE[number % len(PALETTE)], "dash": dash, "width": 2}


def accuracy(panel: Panel, size: str, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy over rounds: the mean over seeds, with a band of one deviation if there are several seeds."""
    figure = go.Figure()
    shown = panel.series if size == "mean" else panel.distinct
    for label, series in shown.items():
        if any(series.key(size) in line["accuracy"] for run in series.runs for line in run.evaluated):
            _curve(figure, series, size, style(labels.index(label)), label, group=label)
    title = _mean_title(panel) if size == "mean" else f"accuracy, {size}"
    _over_rounds(figure, panel, title, "accuracy, %")
    return figure


def _mean_title(panel: Panel) -> str:
    if all(series.headline == "mean" for series in panel.series.values()):
        return "accuracy, mean over sizes"
    return "accuracy, mean over sizes or of the size that a line is about"


def sizes(panel: Panel, series: Series) -> go.Figure:
    """Draw the accuracies of all sizes of one series in one figure, where they can be compared."""
    figure = go.Figure()
    for number, size in enumerate(panel.sizes):
        line = style(number)
        if size == "mean":
            line["width"] = 3
        _curve(figure, series, size, line, "mean over sizes" if size == "mean" else size)
    _over_rounds(figure, panel, "accuracy of every size", "accuracy, %")
    return figure


def _curve(
    figure: go.Figure, series: Series, size: str, line: dict[str, Any], name: str, group: str | None = None
) -> None:
    rounds, values = series.curve(size)
    means = [round(fmean(row), 2) for row in values]
    if values and len(values[0]) > 1:
        deviations = [stdev(row) for row in values]
        upper = [round(m + s, 2) for m, s in zip(means, deviations, strict=True)]
        lower = [round(m - s, 2) for m, s in zip(means, deviations, strict=True)]
        figure.add_scatter(
            x=[*rounds, *reversed(rounds)],
            y=[*upper, *reversed(lower)],
            fill="toself",
            mode="none",
            fillcolor=line["color"],
            opacity=0.18,
            hoverinfo="skip",
            showlegend=False,
            legendgroup=group,
        )
    _add_line(figure, rounds, means, line, name, group, hovertemplate=f"%{{y:.1f}} % ({series.count})")


def _add_line(
    figure: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    line: dict[str, Any],
    name: str,
    group: str | None = None,
    **more: Any,
) -> None:
    """Add a line; a single point would be invisible as a line, so it gets a marker."""
    mode = "lines" if len(x) > 1 else "markers"
    figure.add_scatter(x=x, y=y, mode=mode, line=line, name=name, legendgroup=group, **more)


def _over_rounds(figure: go.Figure, panel: Panel, title: str, unit: str = "") -> None:
    last = max((run.rounds_done for run in panel.runs()), default=0)
    axis: dict[str, Any] = {"title": "round"}
    if last <= EVERY_ROUND_TICKED:
        axis |= {"dtick": 1, "tick0": 0}
    figure.update_layout(title=title, xaxis=axis, yaxis_title=unit)


def traffic(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy against traffic, for the first seed of every series."""

    def megabytes(line: dict[str, Any]) -> float:
        return (line["bytes"]["down"] + line["bytes"]["up"]) / 1e6

    return _accuracy_against(panel, labels, megabytes, "accuracy against traffic", "MB sent, down and up")


def time(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy against the time that the run took, for the first seed of every series."""

    def seconds(line: dict[str, Any]) -> float:
        return sum(line["seconds"].values())

    return _accuracy_against(panel, labels, seconds, "accuracy against time", "seconds")


def _accuracy_against(
    panel: Panel, labels: Sequence[str], cost: Callable[[dict[str, Any]], float], title: str, unit: str
) -> go.Figure:
    figure = go.Figure()
    for label, series in panel.distinct.items():
        spent, xs, ys = 0.0, [], []
        for line in series.runs[0].lines:
            spent += cost(line)
            if series.headline in line.get("accuracy", {}):
                xs.append(round(spent, 3))
                ys.append(round(100 * line["accuracy"][series.headline], 2))
        _add_line(figure, xs, ys, style(labels.index(label)), label, label)
    figure.update_layout(title=title, xaxis_title=unit, yaxis_title="accuracy, %")
    return figure


def losses(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw the test loss (mean over sizes) and the clients' training loss, for the first seed of every series."""
    test, train = go.Figure(), go.Figure()
    for label, series in panel.distinct.items():
        line_style = style(labels.index(label))
        lines = series.runs[0].lines
        evaluated = [line for line in lines if line.get("loss")]
        rounds = [line["round"] for line in evaluated]
        _add_line(test, rounds, [_mean(line["loss"].values()) for line in evaluated], line_style, label, label)
        rounds = [line["round"] for line in lines]
        _add_line(train, rounds, [line.get("train_loss") for line in lines], line_style, label, label)
    _over_rounds(test, panel, "test loss, mean over sizes", "loss")
    _over_rounds(train, panel, "training loss of the clients", "loss")
    return [test, train]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if a value is missing: a loss that was not finite is stored as null."""
    numbers = list(values)
    known = [number for number in numbers if number is not None]
    return round(fmean(known), 4) if known and len(known) == len(numbers) else None


def classes(panel: Panel) -> go.Figure | None:
    """Draw the accuracy of every class at the last evaluation: per series, or per size if there is one series only.

    For the first seed. None if no run has them.
    """
    rows: dict[str, list[float | None]] = {}
    for label, series in panel.distinct.items():
        lines = [line for line in series.runs[0].evaluated if line.get("class_accuracy")]
        if not lines:
            continue
        by_size: dict[str, list[float | None]] = lines[-1]["class_accuracy"]
        if len(panel.distinct) == 1:
            for size, accuracies in by_size.items():
                rows[size] = [_percent(value) for value in accuracies]
        else:
            rows[label] = [_percent(_mean(values)) for values in zip(*by_size.values(), strict=True)]
    if not rows:
        return None
    names = list(rows)[::-1]  # a heat map's first row is its lowest
    heat = go.Heatmap(z=[rows[name] for name in names], y=names, zmin=0, zmax=100, colorscale="Viridis")
    heat.update(colorbar={"title": "%"}, hovertemplate="%{y}, class %{x}: %{z:.1f} %<extra></extra>")
    figure = go.Figure(heat)
    of = "every size" if len(panel.distinct) == 1 else "mean over sizes"
    figure.update_layout(title=f"accuracy of every class, last round, {of}", xaxis_title="class")
    figure.update_xaxes(dtick=1 if len(rows[names[0]]) <= 2 * EVERY_ROUND_TICKED else None)
    return figure


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)


def coefficients(panel: Panel, series: Series, name: str) -> go.Figure | None:
    """Draw one of InCo's coefficients per layer over rounds, for the first seed. None if InCo was off."""
    curves: dict[str, list[tuple[int, float | None]]] = {}
    for line in series.runs[0].lines:
        for layer, numbers in layer_numbers(line, "inco").items():
            curves.setdefault(layer, []).append((line["round"], numbers[name]))
    if not curves:
        return None
    figure = go.Figure()
    for number, (layer, points) in enumerate(curves.items()):
        rounds, values = [at for at, _ in points], [value for _, value in points]
        _add_line(figure, rounds, values, style(number), layer.removesuffix(".weight"))
    _over_rounds(figure, panel, f"{series.label}: {COEFFICIENTS[name]}")
    return figure


def own_numbers(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw the numbers that methods report themselves, one figure per number, for the first seed of every series."""
    drawn: dict[str, go.Figure] = {}
    for label, series in panel.distinct.items():
        curves: dict[str, list[tuple[int, float | None]]] = {}
        for line in series.runs[0].lines:
            for name, value in stage_numbers(line).items():
                curves.setdefault(name, []).append((line["round"], value))
        for name, points in curves.items():
            figure = drawn.setdefault(name, go.Figure())
            rounds, values = [at for at, _ in points], [value for _, value in points]
            _add_line(figure, rounds, values, style(labels.index(label)), label, label)
    for name, figure in drawn.items():
        _over_rounds(figure, panel, f"the method's own: {name.replace('_', ' ')}")
    return list(drawn.values())


def partition(run: Run) -> go.Figure:
    """Draw how many examples of every class each client has. Raises MotleyError if the data set is not here."""
    config = run.config
    dataset = load_dataset(config.data.name, root=config.data.root_path, path=config.data.file_path)
    counts = deal_examples(config, dataset).label_counts(dataset.train.labels, dataset.classes)[:MOST_CLIENTS]
    figure = go.Figure(go.Heatmap(z=counts.T.tolist(), colorscale="Viridis", colorbar={"title": "examples"}))
    figure.update_traces(hovertemplate="client %{x}, class %{y}: %{z} examples<extra></extra>")
    first = f", the first {MOST_CLIENTS}" if config.federation.clients > MOST_CLIENTS else ""
    figure.update_layout(
        title=f"who holds what: examples per client and class (seed {config.seed}{first})",
        xaxis_title="client",
        yaxis_title="class",
    )
    return figure
