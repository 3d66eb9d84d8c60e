"""The report's plotly figures. They have no theme: the page applies its own colors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import fmean, stdev
from typing import Any

from plotly import graph_objects as go

from motley.assembly import deal_examples
from motley.core.errors import MotleyError
from motley.data import PARTITIONS, Partition
from motley.report.report_data import Panel, Run, Series
from motley.runs.folder import RunFolder
from motley.runs.integrity import trained_on
from motley.runs.metrics import layer_metrics, scores_of, stage_metrics
from motley.tasks import MetricInfo

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


def line_of(series: Series, labels: Sequence[str]) -> dict[str, Any]:
    """Return the line style of a series; `labels` are the labels of all series, in order."""
    return reference_style(style(labels.index(series.label)), series.is_reference)


def reference_style(line: dict[str, Any], is_reference: bool) -> dict[str, Any]:
    """Return a line style, dotted if it is for a reference."""
    return {**line, "dash": "dot"} if is_reference else line


def plain(text: str) -> str:
    """Escape a text that plotly should show literally. It takes tags, such as links, for
    formatting.
    """
    return escape(text, quote=False)


def show_names_as_they_are(figure: go.Figure) -> None:
    """Change the texts of a finished figure so that plotly takes no name for formatting.

    The page's own legend and its switches need the unescaped names of traces, so this is the last
    step before a figure is written.
    """
    for trace in figure.data:
        if trace.name:
            trace.name = plain(trace.name)
        if trace.type == "heatmap" and trace.y is not None:
            trace.y = [plain(name) for name in trace.y]
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        if axis.title.text:
            axis.title.text = plain(axis.title.text)


def scores(panel: Panel, size: str, labels: Sequence[str]) -> go.Figure:
    """Draw the primary metric over rounds for one size, or for the mean over sizes.

    Lines are means over seeds. With several seeds, a band shows one standard deviation around
    each line.
    """
    figure = go.Figure()
    shown = panel.series if size == "mean" else panel.distinct
    for label, series in shown.items():
        if series.has_scores(size):
            _curve(figure, series, size, line_of(series, labels), label, group=label)
    metric = panel.metric
    title = _mean_title(panel) if size == "mean" else f"{metric.name}, {size}"
    _over_rounds(figure, panel, title, _axis(panel))
    return figure


def _mean_title(panel: Panel) -> str:
    name = panel.metric.name
    if all(series.headline == "mean" for series in panel.series.values()):
        return f"{name}, mean over sizes"
    return f"{name}, mean over sizes (or of the one size that a line shows)"


def _axis(panel: Panel) -> str:
    """Return the title of an axis for the primary metric. Higher is better unless it says so."""
    metric = panel.metric
    return metric.label if metric.higher_is_better else f"{metric.label} ({metric.direction})"


def sizes(panel: Panel, series: Series) -> go.Figure:
    """Draw the scores of all sizes of one series in one figure, to compare the sizes."""
    figure = go.Figure()
    for number, size in enumerate(panel.sizes):
        line = style(number)
        if size == "mean":
            line["width"] = 3
        _curve(figure, series, size, line, "mean over sizes" if size == "mean" else size)
    _over_rounds(figure, panel, f"{panel.metric.name} per size", _axis(panel))
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
    percent = series.runs[0].metric.percent
    digits = 2 if percent else 6
    means = [round(fmean(seeds), digits) for seeds in values]
    if values and len(values[0]) > 1:
        upper, lower = [], []
        for mean, seeds in zip(means, values, strict=True):
            std = stdev(seeds)
            upper.append(round(mean + std, digits))
            lower.append(round(mean - std, digits))
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
    value = "%{y:.1f} %" if percent else "%{y:.4g}"
    _add_line(figure, rounds, means, line, name, group, hovertemplate=f"{value} ({series.count})")


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
    """Draw the primary metric against traffic, for the first run of every series."""

    def megabytes(line: dict[str, Any]) -> float:
        return (line["bytes"]["down"] + line["bytes"]["up"]) / 1e6

    return _against(panel, labels, megabytes, "traffic", "MB sent, down and up")


def time(panel: Panel, labels: Sequence[str]) -> go.Figure:
    """Draw the primary metric against computing time, for the first run of every series."""

    def seconds(line: dict[str, Any]) -> float:
        return sum(line["seconds"].values())

    return _against(panel, labels, seconds, "time", "seconds")


def _against(
    panel: Panel,
    labels: Sequence[str],
    cost: Callable[[dict[str, Any]], float],
    name: str,
    unit: str,
) -> go.Figure:
    """Draw the primary metric against a cumulative cost; `cost` returns the cost of one round."""
    figure = go.Figure()
    for label, series in panel.distinct.items():
        run = series.runs[0]
        total = 0.0
        costs, values = [], []
        for line in run.lines:
            total += cost(line)
            line_scores = scores_of(line)
            if series.headline in line_scores:
                costs.append(round(total, 3))
                values.append(_shown(run.metric, line_scores[series.headline]))
        _add_line(figure, costs, values, line_of(series, labels), label, label)
    title = f"{panel.metric.name} against {name}"
    figure.update_layout(title=title, xaxis_title=unit, yaxis_title=_axis(panel))
    return figure


def losses(panel: Panel, labels: Sequence[str]) -> list[go.Figure]:
    """Draw test loss (mean over sizes) and training loss, for the first run of every series."""
    test, train = go.Figure(), go.Figure()
    for label, series in panel.distinct.items():
        line_style = line_of(series, labels)
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
    rows = _class_accuracies(panel)
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


def _class_accuracies(panel: Panel) -> dict[str, list[float | None]]:
    """Return the rows of the heat map `classes`, in percent."""
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
    return rows


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
        for metrics in series.runs[0].lines:
            for name, value in stage_metrics(metrics).items():
                curves.setdefault(name, Curve()).add(metrics["round"], value)
        for name, curve in curves.items():
            figure = figures.setdefault(name, go.Figure())
            line = line_of(series, labels)
            _add_line(figure, curve.rounds, curve.values, line, label, label)
    for name, figure in figures.items():
        _over_rounds(figure, panel, f"method metric: {name.replace('_', ' ')}")
    return list(figures.values())


def client_scores(panel: Panel, labels: Sequence[str]) -> go.Figure | None:
    """Draw the scores of clients from the worst to the best, for the first run of every series.

    One line per series, and a thin one for the personalized scores. At 10 % on the x axis, a tenth
    of the clients has this score or a worse one. Returns None if no run has scores of clients.
    """
    figure = go.Figure()
    for label, series in panel.distinct.items():
        metric, clients = series.runs[0].metric, series.runs[0].client_scores
        if clients is None:
            continue
        line = line_of(series, labels)
        _sorted_scores(figure, metric, clients.scores(), line, label, label)
        after = clients.scores(personalized=True)
        if after == clients.scores():
            continue  # clients have models of their own, which are personal already
        thin = {**line, "width": 1}
        _sorted_scores(figure, metric, after, thin, f"{label}, personalized", label)
    if not figure.data:
        return None
    personalized = any(trace.line.width == 1 for trace in figure.data)
    thin_lines = " (thin: after local training)" if personalized else ""
    figure.update_layout(
        title=f"{panel.metric.name} of clients on their own test data, sorted{thin_lines}",
        xaxis_title="clients, %",
        yaxis_title=_axis(panel),
    )
    return figure


def _sorted_scores(
    figure: go.Figure,
    metric: MetricInfo,
    values: Sequence[float],
    line: dict[str, Any],
    name: str,
    group: str,
) -> None:
    if not values:
        return
    worst_first = sorted(values, reverse=not metric.higher_is_better)
    count = len(values)
    places = [round(100 * (number + 1) / count, 2) for number in range(count)]
    shown = [_shown(metric, value) for value in worst_first]
    hover = f"{plain(name)}: %{{x:.0f}} % of clients have %{{y:.4g}} or worse<extra></extra>"
    _add_line(figure, places, shown, line, name, group, hovertemplate=hover)


def _shown(metric: MetricInfo, value: float) -> float:
    """Return a score as figures show it: accuracies in percent, and rounded."""
    return round(metric.scaled(value), 2 if metric.percent else 6)


def client_curves(panel: Panel, labels: Sequence[str], key: str, name: str) -> go.Figure | None:
    """Draw a number of the clients' scores over rounds, for the first run of every series.

    `key` is a key of `motley.runs.metrics.summarize_clients`, and `name` its name in the title.
    None if no run has it.
    """
    figure = go.Figure()
    for label, series in panel.distinct.items():
        curve = Curve()
        for metrics in series.runs[0].lines:
            value = (metrics.get("client_scores") or {}).get(key)
            if value is not None:
                curve.add(metrics["round"], _shown(series.runs[0].metric, value))
        if curve.rounds:
            _add_line(figure, curve.rounds, curve.values, line_of(series, labels), label, label)
    if not figure.data:
        return None
    _over_rounds(figure, panel, f"{panel.metric.name}, {name}", _axis(panel))
    return figure


def _examples_per_client(run: Run, dealt: Partition) -> go.Figure:
    """Draw the number of examples per client, for a task without classes."""
    figure = go.Figure(go.Bar(y=dealt.sizes[:MAX_CLIENTS].tolist()))
    title = f"data partition: examples per client (seed {run.config.seed})"
    figure.update_layout(title=title, xaxis_title="client", yaxis_title="examples")
    return figure


def partition(run: Run) -> go.Figure:
    """Draw the number of examples per client and class.

    Raises MotleyError if the data set is not on this machine, or is another one by now.
    """
    config = run.config
    PARTITIONS.entry(config.data.partition.name, "data.partition.name")  # a user's may be missing
    dataset = config.data.load()
    if not trained_on(RunFolder(run.path), dataset.train):
        raise MotleyError("the training examples are not those that the run trained on.")
    dealt = deal_examples(config, dataset).partition
    if not config.task.build(dataset.task).has_classes:
        return _examples_per_client(run, dealt)
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
