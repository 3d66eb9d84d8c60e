"""The report's plotly figures. They have no theme: the page applies its own colors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from plotly import graph_objects as go

from motley.assembly import deal_examples
from motley.data import load_dataset
from motley.report.report_data import Panel, Run, Series
from motley.runs.metrics import layer_metrics, stage_metrics

#: Colors that can be distinguished on a light and on a dark page.
PALETTE = (
    *("#3f75d6", "#e8710a", "#1a9c3f", "#a445c9", "#00a3bf"),
    *("#c9a100", "#dc3545", "#e66fb4", "#a5714f", "#808b96"),
)
#: Plotly's dash styles, each with the equivalent SVG stroke-dasharray for the legend.
DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "8 3 2 3"}
#: The heat map of a partition shows at most this many clients.
MAX_CLIENTS = 200
#: Up to this many rounds, every round has a tick. Otherwise plotly would put ticks at 1.5 rounds.
MAX_TICKED_ROUNDS = 12
#: Up to this many classes, every class has a tick.
MAX_TICKED_CLASSES = 24
#: The InCo coefficients that are drawn, with their titles.
COEFFICIENTS = {"theta": "theta per layer", "positive": "share of beta > 0 per layer"}


def style(number: int) -> dict[str, Any]:
    """Return the line style of the n-th series. When the colors run out, the dash style changes."""
    dashes = list(DASHES)
    dash = dashes[number // len(PALETTE) % len(dashes)]
    return {"color": PALETTE[number % len(PALETTE)], "dash": dash, "width": 2}


def accuracy(panel: Panel, size: str, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy over rounds for one size, or for the mean over sizes.

    Lines are means over seeds. With several seeds, a band shows one standard deviation around
    each line.
    """
    figure = go.Figure()
    shown = panel.series if size == "mean" else panel.distinct
    for label, series in shown.items():
        if series.has_accuracy(size):
            _curve(figure, series, size, style(labels.index(label)), label, group=label)
    title = _mean_title(panel) if size == "mean" else f"accuracy, {size}"
    _over_rounds(figure, panel, title, "accuracy, %")
    return figure


def _mean_title(panel: Panel) -> str:
    if all(series.headline == "mean" for series in panel.series.values()):
        return "accuracy, mean over sizes"
    return "accuracy, mean over sizes (or of the one size that a line shows)"


def sizes(panel: Panel, series: Series) -> go.Figure:
    """Draw the accuracies of all sizes of one series in one figure, to compare the sizes."""
    figure = go.Figure()
    for number, size in enumerate(panel.sizes):
        line = style(number)
        if size == "mean":
            line["width"] = 3
        _curve(figure, series, size, line, "mean over sizes" if size == "mean" else size)
    _over_rounds(figure, panel, "accuracy per size", "accuracy, %")
    return figure


def _curve(
    figure: go.Figure,
    series: Series,
    size: str,
    line: dict[str, Any],
    name: str,
    group: str | None = None,
) -> None:
    """Add the mean over seeds and, with several seeds, the band around it."""
    rounds, values = series.curve(size)
    means = [round(fmean(seeds), 2) for seeds in values]
    if values and len(values[0]) > 1:
        upper, lower = [], []
        for mean, seeds in zip(means, values, strict=True):
            std = stdev(seeds)
            upper.append(round(mean + std, 2))
            lower.append(round(mean - std, 2))
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
    _add_line(
        figure, rounds, means, line, name, group, hovertemplate=f"%{{y:.1f}} % ({series.count})"
    )


def _add_line(
    figure: go.Figure,
    x: Sequence[float],
    y: Sequence[float | None],
    line: dict[str, Any],
    name: str,
    group: str | None = None,
    **options: Any,
) -> None:
    """Add a line. A single point would be invisible as a line, so it becomes a marker."""
    mode = "lines" if len(x) > 1 else "markers"
    figure.add_scatter(x=x, y=y, mode=mode, line=line, name=name, legendgroup=group, **options)


def _over_rounds(figure: go.Figure, panel: Panel, title: str, unit: str = "") -> None:
    """Set the title and the axes of a figure whose x axis is the round."""
    last = max((run.rounds_done for run in panel.runs()), default=0)
    axis: dict[str, Any] = {"title": "round"}
    if last <= MAX_TICKED_ROUNDS:
        axis |= {"dtick": 1, "tick0": 0}
    figure.update_layout(title=title, xaxis=axis, yaxis_title=unit)


def traffic(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy against traffic, for the first run of every series."""

    def megabytes(line: dict[str, Any]) -> float:
        return (line["bytes"]["down"] + line["bytes"]["up"]) / 1e6

    return _accuracy_against(
        panel, labels, megabytes, "accuracy against traffic", "MB sent, down and up"
    )


def time(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw accuracy against computing time, for the first run of every series."""

    def seconds(line: dict[str, Any]) -> float:
        return sum(line["seconds"].values())

    return _accuracy_against(panel, labels, seconds, "accuracy against time", "seconds")


def _accuracy_against(
    panel: Panel,
    labels: Sequence[str],
    cost: Callable[[dict[str, Any]], float],
    title: str,
    unit: str,
) -> go.Figure:
    """Draw accuracy against a cumulative cost; `cost` is that of one line of metrics."""
    figure = go.Figure()
    for label, series in panel.distinct.items():
        total = 0.0
        costs, accuracies = [], []
        for line in series.runs[0].lines:
            total += cost(line)
            if series.headline in line.get("accuracy", {}):
                costs.append(round(total, 3))
                accuracies.append(round(100 * line["accuracy"][series.headline], 2))
        _add_line(figure, costs, accuracies, style(labels.index(label)), label, label)
    figure.update_layout(title=title, xaxis_title=unit, yaxis_title="accuracy, %")
    return figure


def losses(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw test loss (mean over sizes) and training loss, for the first run of every series."""
    test, train = go.Figure(), go.Figure()
    for label, series in panel.distinct.items():
        line_style = style(labels.index(label))
        lines = series.runs[0].lines
        evaluated = [line for line in lines if line.get("loss")]
        rounds = [line["round"] for line in evaluated]
        test_losses = [_mean(line["loss"].values()) for line in evaluated]
        _add_line(test, rounds, test_losses, line_style, label, label)
        rounds = [line["round"] for line in lines]
        train_losses = [line.get("train_loss") for line in lines]
        _add_line(train, rounds, train_losses, line_style, label, label)
    _over_rounds(test, panel, "test loss, mean over sizes", "loss")
    _over_rounds(train, panel, "training loss of the clients", "loss")
    return [test, train]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if a value is None: a loss that was not finite is stored as null."""
    numbers = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    return round(fmean(numbers), 4) if numbers else None


def classes(panel: Panel) -> go.Figure | None:
    """Draw the accuracy per class at the last evaluation, for the first run of every series.

    There is one row per series, or one row per size if there is only one series. Returns None if
    no run has accuracies per class.
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
            per_class = zip(*by_size.values(), strict=True)
            rows[label] = [_percent(_mean(over_sizes)) for over_sizes in per_class]
    if not rows:
        return None
    names = list(rows)[::-1]  # plotly draws the first row of a heat map at the bottom
    heatmap = go.Heatmap(
        z=[rows[name] for name in names],
        y=names,
        zmin=0,
        zmax=100,
        colorscale="Viridis",
        colorbar={"title": "%"},
        hovertemplate="%{y}, class %{x}: %{z:.1f} %<extra></extra>",
    )
    figure = go.Figure(heatmap)
    scope = "per size" if len(panel.distinct) == 1 else "mean over sizes"
    figure.update_layout(title=f"accuracy per class, last evaluation, {scope}", xaxis_title="class")
    figure.update_xaxes(dtick=1 if len(rows[names[0]]) <= MAX_TICKED_CLASSES else None)
    return figure


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 1)


class Curve:
    """A metric over rounds."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.values: list[float | None] = []

    def add(self, round_number: int, value: float | None) -> None:
        """Add the value of one round."""
        self.rounds.append(round_number)
        self.values.append(value)


def coefficients(panel: Panel, series: Series, name: str) -> go.Figure | None:
    """Draw one InCo coefficient per layer over rounds, for the first run. None if InCo was off."""
    curves: dict[str, Curve] = {}
    for line in series.runs[0].lines:
        for layer, coefficients in layer_metrics(line, "inco").items():
            curves.setdefault(layer, Curve()).add(line["round"], coefficients[name])
    if not curves:
        return None
    figure = go.Figure()
    for number, (layer, curve) in enumerate(curves.items()):
        label = layer.removesuffix(".weight")
        _add_line(figure, curve.rounds, curve.values, style(number), label)
    _over_rounds(figure, panel, f"{series.label}: {COEFFICIENTS[name]}")
    return figure


def method_metrics(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw the metrics that methods report, one figure each, for the first run of every series."""
    figures: dict[str, go.Figure] = {}
    for label, series in panel.distinct.items():
        curves: dict[str, Curve] = {}
        for line in series.runs[0].lines:
            for name, value in stage_metrics(line).items():
                curves.setdefault(name, Curve()).add(line["round"], value)
        for name, curve in curves.items():
            figure = figures.setdefault(name, go.Figure())
            color = style(labels.index(label))
            _add_line(figure, curve.rounds, curve.values, color, label, label)
    for name, figure in figures.items():
        _over_rounds(figure, panel, f"method metric: {name.replace('_', ' ')}")
    return list(figures.values())


def partition(run: Run) -> go.Figure:
    """Draw the number of examples per client and class.

    Raises MotleyError if the data set is not on this machine.
    """
    config = run.config
    dataset = load_dataset(config.data.name, root=config.data.root_path, path=config.data.file_path)
    dealt = deal_examples(config, dataset).partition
    counts = dealt.label_counts(dataset.train.targets, dataset.classes)
    heatmap = go.Heatmap(
        z=counts[:MAX_CLIENTS].T.tolist(),
        colorscale="Viridis",
        colorbar={"title": "examples"},
        hovertemplate="client %{x}, class %{y}: %{z} examples<extra></extra>",
    )
    figure = go.Figure(heatmap)
    details = f"seed {config.seed}"
    if config.federation.clients > MAX_CLIENTS:
        details += f", first {MAX_CLIENTS} clients"
    figure.update_layout(
        title=f"data partition: examples per client and class ({details})",
        xaxis_title="client",
        yaxis_title="class",
    )
    return figure
