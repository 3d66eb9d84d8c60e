"""The report's HTML page: one file that includes all scripts and figures and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.io import to_json
from plotly.offline import get_plotlyjs

from motley.core.errors import MotleyError
from motley.report import figures
from motley.report.report_data import Panel, ReportData, Run, Series
from motley.report.tables import Rows, clients, costs, environments, final
from motley.studies.results import COLUMNS

#: The remaining time is estimated from the last rounds, this many.
ROUNDS_TIMED = 20


def render(data: ReportData, title: str, *, live: bool = False) -> str:
    """Return the page as HTML.

    A live page loads plotly from its server (`report/server.py`), asks it for changes every two
    seconds, and reloads itself if there are any.
    """
    body = "\n".join(_body(data, live))
    css = _own_file("page.css")
    js = _own_file("page.js")
    plotly = '<script src="plotly.js"></script>' if live else f"<script>{get_plotlyjs()}</script>"
    return f"""<!doctype html>
<html lang="en"{" data-live" if live else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{content_policy(live=live)}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></header>
{body}
{plotly}
<script>{js}</script>
</body>
</html>
"""


def _own_file(name: str) -> str:
    return (resources.files("motley.report") / name).read_text(encoding="utf-8")


@cache
def content_policy(*, live: bool) -> str:
    """Return the page's Content-Security-Policy: nothing is fetched, and no other script runs.

    The page's own scripts are named by their hashes, so a script that a name or a file smuggled
    into the page would not run.
    """
    scripts = [_own_file("page.js")]
    if not live:
        scripts.append(get_plotlyjs())
    hashes = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    directives = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        f"script-src {' '.join(hashes)}" + (" 'self'" if live else ""),
    ]
    if live:
        directives.append("connect-src 'self'")
    return "; ".join(directives)


def plotly_script() -> str:
    """Return the source of plotly.js, for the live server."""
    return get_plotlyjs()


def _body(data: ReportData, live: bool) -> Iterator[str]:
    if live:
        yield from _progress(data)
    for study in data.studies:
        yield from _study(study)
    if len(data.labels) > 1:
        checkboxes = _checkboxes(data.labels, data.references)
        yield f'<nav id="series" aria-label="Show or hide">{checkboxes}</nav>'
    if data.differences:
        rows = []
        for name, *values in data.differences:
            # A zero-width space after each dot: long names of settings may wrap only there.
            rows.append([name.replace(".", ".\u200b"), *values])
        yield f"<details><summary>Settings that differ</summary>{_table(rows)}</details>"
    for number, panel in enumerate(data.panels.values()):
        is_open = " open" if number == 0 else ""
        yield f'<details class="panel"{is_open}><summary>{escape(panel.title)}</summary>'
        yield from _panel(panel, data.labels)
        yield "</details>"
    yield from _analyses(data.runs)
    yield from _configurations(data)


def _progress(data: ReportData) -> Iterator[str]:
    """Yield how far a live run is, or how many runs of a live study are finished."""
    runs = data.runs
    if data.studies:
        planned = sum(study["planned_runs"] for study in data.studies)
        yield f'<p class="progress">{len(runs)} of {planned} runs finished</p>'
    elif len(runs) == 1:
        yield f'<p class="progress">{escape(progress(runs[0]))}</p>'


def progress(run: Run) -> str:
    """Return how far a run is, such as "round 3 of 6, about 20 s left"."""
    total, done = run.config.training.rounds, run.rounds_done
    if done >= total:
        return f"finished: {total} rounds"
    if not done:
        return f"round 0 of {total}, no round is finished yet"
    seconds = [sum(line["seconds"].values()) for line in run.lines[-ROUNDS_TIMED:]]
    remaining = sum(seconds) / len(seconds) * (total - done)
    return f"round {done} of {total}, about {_duration(remaining)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _checkboxes(labels: list[str], references: set[str]) -> str:
    """Return one checkbox per series, each with a sample of its line."""
    checkboxes = []
    for number, label in enumerate(labels):
        line = figures.reference_style(figures.style(number), label in references)
        checkbox = f'<input type="checkbox" checked value="{escape(label)}">'
        text = f"{checkbox}{_sample(line)}{escape(label)}"
        checkboxes.append(f'<label style="--color: {line["color"]}">{text}</label>')
    return "".join(checkboxes)


def _sample(line: dict[str, Any]) -> str:
    """Return a short line as SVG, in a series' color and dash style."""
    dashes = figures.DASHES[line["dash"]]
    stroke = f'stroke="{line["color"]}" stroke-width="3" stroke-dasharray="{dashes}"'
    path = f'<line x1="1" y1="5" x2="29" y2="5" {stroke}/>'
    return f'<svg class="sample" viewBox="0 0 30 10" aria-hidden="true">{path}</svg>'


def _study(study: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2>{escape(study['name'])}: {escape(study['summary'])}</h2>"
    note = f" {escape(study['note'])}" if study["note"] else ""
    paper = f"{escape(study['paper'])}. " if study["paper"] else ""
    scale = f"Scale {escape(study['scale'])}: {escape(study['scale_means'])}"
    yield f"<p>{paper}{scale}.{note}</p>"
    columns: dict[str, list[list[str]]] = {}
    for cell in study["cells"]:
        rows = columns.setdefault(cell["column"], [])
        if not cell["missing"]:
            rows.append(cell["line"])
    for title, rows in columns.items():
        if rows:
            yield f"<h3>{escape(title)}</h3>{_table([list(COLUMNS), *rows])}"
    if study["missing"]:
        items = []
        for reason, names in study["missing"].items():
            items.append(f"<li>{escape(', '.join(names))}: {escape(reason)}</li>")
        yield f"<h3>Missing</h3><ul>{''.join(items)}</ul>"
    yield "</section>"


def _panel(panel: Panel, labels: list[str]) -> Iterator[str]:
    if not any(run.evaluated for run in panel.runs()):
        yield "<p>No round has been evaluated yet.</p>"
        return
    drawn = _scores(panel, labels)
    drawn.append(figures.client_scores(panel, labels))
    drawn.append(figures.client_curves(panel, labels, "mean", "mean over clients"))
    drawn.append(figures.client_curves(panel, labels, "worst_tenth", "worst tenth of the clients"))
    drawn.append(figures.traffic(panel, labels))
    drawn.append(figures.time(panel, labels))
    drawn.extend(figures.losses(panel, labels))
    drawn.append(figures.classes(panel))
    for series in panel.distinct.values():
        for name in figures.COEFFICIENTS:
            drawn.append(figures.coefficients(panel, series, name))
    drawn.extend(figures.method_metrics(panel, labels))
    partition_missing = ""
    try:
        drawn.append(figures.partition(next(panel.runs())))
    except MotleyError as error:
        reason = escape(str(error).splitlines()[0])
        partition_missing = f"<p>The partition cannot be drawn here: {reason}</p>"
    # Tables come before figures, because on a phone the figures fill several screens.
    label = panel.metric.label
    heading = escape(label[0].upper() + label[1:])
    yield f"<h3>{heading}</h3>{_table(final(panel))}{_notes(panel.series.values())}"
    client_rows = clients(panel)
    if len(client_rows) > 1:
        heading = f"Clients on their own test data, last scoring: {panel.metric.label}"
        yield f"<h3>{escape(heading)}</h3>{_table(client_rows)}"
    figures_html = [_figure(figure) for figure in drawn if figure is not None]
    yield f'<div class="figures">{"".join(figures_html)}</div>{partition_missing}'
    yield f"<h3>Rounds, traffic and time</h3>{_table(costs(panel))}"


def _scores(panel: Panel, labels: list[str]) -> list[Any]:
    """Return the score figures: one for all sizes of a single series, else one per size."""
    if len(panel.sizes) <= 2:
        return [figures.scores(panel, "mean", labels)]
    if len(panel.series) == 1:
        return [figures.sizes(panel, next(iter(panel.series.values())))]
    drawn = [figures.scores(panel, size, labels) for size in panel.sizes]
    values: list[float] = []
    for figure in drawn:
        for trace in figure.data:
            values += trace.y
    if values:
        # The same scale for all sizes, so that the figures can be compared.
        low, high = min(values), max(values)
        margin = 0.04 * (high - low) + 0.5
        for figure in drawn:
            figure.update_yaxes(range=[low - margin, high + margin])
    return drawn


def _notes(all_series: Iterable[Series]) -> str:
    paragraphs = []
    for series in all_series:
        sentences = series.repeats
        if series.is_reference:
            sentences.append(f"{series.label}: local training alone, the reference (dotted).")
        for sentence in sentences:
            paragraphs.append(f'<p class="note">{escape(sentence)}</p>')
    return "".join(paragraphs)


def _figure(figure: Any) -> str:
    """Return a figure with title and legend as HTML text.

    HTML text wraps on a phone, where plotly's own title and legend would be cut off.
    """
    title = figure.layout.title.text or ""
    figure.update_layout(template="none", title=None)
    entries = []
    for trace in figure.data:
        if trace.type == "scatter" and trace.name and not trace.legendgroup:
            line = {"color": trace.line.color, "dash": trace.line.dash}
            entries.append(f"<li>{_sample(line)}{escape(trace.name)}</li>")
    legend = f'<ul class="legend">{"".join(entries)}</ul>' if entries else ""
    figures.show_names_as_they_are(figure)
    data = to_json(figure).replace("<", "\\u003c")
    plot = f'<div class="plot"><script type="application/json">{data}</script></div>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{plot}</figure>"


def _analyses(runs: list[Run]) -> Iterator[str]:
    parts = []
    for run in runs:
        for picture in sorted((run.path / "analysis").glob("*.png")):
            title = f"{picture.stem} of {run.path.name}"
            parts.append(f"<h3>{escape(title)}</h3>{_picture(picture)}")
    if parts:
        yield f"<section><h2>Analyses</h2>{''.join(parts)}</section>"


def _picture(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    image = f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'
    return f'<div class="picture">{image}</div>'


def _configurations(data: ReportData) -> Iterator[str]:
    """Yield the versions and hardware of all runs, and their complete configurations."""
    yield "<section><h2>Runs and their settings</h2>"
    all_series: list[Series] = []
    for panel in data.panels.values():
        all_series.extend(panel.series.values())
    yield _table(environments(all_series))
    for run in data.runs:
        config = escape(run.config.to_toml())
        if run.missing_code:
            yield f"<p>{escape(run.path.name)}: {escape(run.missing_code)}</p>"
        yield f"<details><summary>{escape(run.path.name)}</summary><pre>{config}</pre></details>"
    yield "</section>"


def _table(rows: Rows) -> str:
    """Return a table whose first row and column are headings. Empty columns are left out."""
    columns = []
    for number in range(len(rows[0])):
        if any(row[number] for row in rows[1:]):
            columns.append(number)
    cells_of_rows = []
    for row in rows:
        cells_of_rows.append([escape(row[number]) for number in columns])
    head, *body = cells_of_rows
    headings = "".join(f"<th>{cell}</th>" for cell in head)
    lines = []
    for first, *others in body:
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f"<tr><th>{first}</th>{cells}</tr>")
    thead = f"<thead><tr>{headings}</tr></thead>"
    tbody = f"<tbody>{''.join(lines)}</tbody>"
    return f'<div class="table"><table>{thead}{tbody}</table></div>'
