"""The page: one HTML file with everything in it, scripts and figures included. Nothing is fetched from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.io import to_json
from plotly.offline import get_plotlyjs

from motley.core.errors import MotleyError
from motley.report import figures
from motley.report.material import Material, Panel, Run, Series
from motley.report.tables import Rows, costs, environments, final
from motley.studies.results import COLUMNS

#: The time left is estimated from this many of the last rounds.
ROUNDS_TIMED = 20


def render(material: Material, title: str, *, live: bool = False) -> str:
    """Return the page. A live one takes plotly from its own server and looks for news there."""
    body = "\n".join(_body(material, live))
    scripts = resources.files("motley.report")
    css, js = ((scripts / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    plotly = '<script src="plotly.js"></script>' if live else f"<script>{get_plotlyjs()}</script>"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'unsafe-inline'"
    policy += " 'self'; connect-src 'self'" if live else ""
    return f"""<!doctype html>
<html lang="en"{" data-live" if live else ""}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
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


def plotly_script() -> str:
    """Return plotly's script, for a server that hands it out."""
    return get_plotlyjs()


def _body(material: Material, live: bool) -> Iterator[str]:
    if live:
        yield from _progress(material)
    for study in material.studies:
        yield from _study(study)
    if len(material.labels) > 1:
        yield f'<nav id="series" aria-label="Show or hide">{_chips(material.labels)}</nav>'
    if material.differences:
        # Names of settings may break after a dot only.
        table = _table([[row[0].replace(".", ".\u200b"), *row[1:]] for row in material.differences])
        yield f"<details><summary>Settings that differ</summary>{table}</details>"
    for number, panel in enumerate(material.panels.values()):
        yield f'<details class="panel"{" open" if number == 0 else ""}><summary>{escape(panel.title)}</summary>'
        yield from _panel(panel, material.labels)
        yield "</details>"
    yield from _analyses(material.runs)
    yield from _what_was_run(material)


def _progress(material: Material) -> Iterator[str]:
    """Say how far a live run is. A study says how many of its runs are finished."""
    runs = material.runs
    if material.studies:
        planned = sum(study.get("planned_runs", 0) for study in material.studies)
        yield f'<p class="progress">{len(runs)} of {planned} runs finished</p>'
    elif len(runs) == 1:
        yield f'<p class="progress">{escape(progress(runs[0]))}</p>'


def progress(run: Run) -> str:
    """Return how far a run is: "round 3 of 6, about 20 s left"."""
    total, done = run.config.training.rounds, run.rounds_done
    if done >= total:
        return f"finished: {total} rounds"
    if not done:
        return f"round 0 of {total}, no round is finished yet"
    timed = [sum(line["seconds"].values()) for line in run.lines[-ROUNDS_TIMED:]]
    seconds = sum(timed) / len(timed) * (total - done)
    return f"round {done} of {total}, about {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _chips(labels: list[str]) -> str:
    """Return a checkbox per series, each with a sample of its line."""
    chips = []
    for number, label in enumerate(labels):
        line = figures.style(number)
        chips.append(
            f'<label style="--colour: {line["color"]}"><input type="checkbox" checked value="{escape(label)}">'
            f"{_sample(line)}{escape(label)}</label>"
        )
    return "".join(chips)


def _sample(line: dict[str, Any]) -> str:
    """Return a short piece of a line, in its colour and with its dashes."""
    dashes = figures.DASHES[line["dash"]]
    return (
        '<svg class="sample" viewBox="0 0 30 10" aria-hidden="true"><line x1="1" y1="5" x2="29" y2="5" '
        f'stroke="{line["color"]}" stroke-width="3" stroke-dasharray="{dashes}"/></svg>'
    )


def _study(study: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2>{escape(study['name'])}: {escape(study['summary'])}</h2>"
    note = f" {escape(study['note'])}" if study["note"] else ""
    paper = f"{escape(study['paper'])}. " if study["paper"] else ""
    yield f"<p>{paper}Scale {study['scale']}: {escape(study['scale_means'])}.{note}</p>"
    for title in dict.fromkeys(cell["column"] for cell in study["cells"]):
        rows = [cell["line"] for cell in study["cells"] if cell["column"] == title and not cell["missing"]]
        if rows:
            yield f"<h3>{escape(title)}</h3>{_table([list(COLUMNS), *rows])}"
    if study["missing"]:
        lacks = (f"<li>{escape(', '.join(names))}: {escape(why)}</li>" for why, names in study["missing"].items())
        yield f"<h3>Missing</h3><ul>{''.join(lacks)}</ul>"
    yield "</section>"


def _panel(panel: Panel, labels: list[str]) -> Iterator[str]:
    if not any(run.evaluated for run in panel.runs()):
        yield "<p>No round has been evaluated yet.</p>"
        return
    drawn = _accuracies(panel, labels)
    drawn += [figures.traffic(panel, labels), figures.time(panel, labels), *figures.losses(panel, labels)]
    drawn.append(figures.classes(panel))
    for series in panel.distinct.values():
        drawn += [figures.coefficients(panel, series, name) for name in figures.COEFFICIENTS]
    drawn += figures.own_numbers(panel, labels)
    partition_missing = ""
    try:
        drawn.append(figures.partition(next(panel.runs())))
    except MotleyError as error:
        partition_missing = f"<p>The partition cannot be drawn here: {escape(str(error).splitlines()[0])}</p>"
    # Numbers first: on a phone the figures fill several screens.
    yield f"<h3>Accuracy, %</h3>{_table(final(panel))}{_notes(panel.series.values())}"
    figures_html = [_figure(figure) for figure in drawn if figure is not None]
    yield f'<div class="figures">{"".join(figures_html)}</div>{partition_missing}'
    yield f"<h3>Rounds, traffic and time</h3>{_table(costs(panel))}"


def _accuracies(panel: Panel, labels: list[str]) -> list[Any]:
    """Return the accuracy figures: all sizes of a single series in one, or one figure per size for several series."""
    if len(panel.sizes) <= 2:
        return [figures.accuracy(panel, "mean", labels)]
    if len(panel.series) == 1:
        return [figures.sizes(panel, next(iter(panel.series.values())))]
    drawn = [figures.accuracy(panel, size, labels) for size in panel.sizes]
    values = [value for figure in drawn for trace in figure.data for value in trace.y]
    if values:
        # One scale for all sizes, so that figures can be compared.
        low, high = min(values), max(values)
        room = 0.04 * (high - low) + 0.5
        for figure in drawn:
            figure.update_yaxes(range=[low - room, high + room])
    return drawn


def _notes(series: Iterable[Series]) -> str:
    sentences = [sentence for one in series for sentence in one.repeats]
    return "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in sentences)


def _figure(figure: Any) -> str:
    """Return a figure with its title and legend in HTML, which wraps on a phone; plotly's own would be cut."""
    title = figure.layout.title.text or ""
    figure.update_layout(template="none", title=None)
    entries = []
    for trace in figure.data:
        if trace.type == "scatter" and trace.name and not trace.legendgroup:
            line = {"color": trace.line.color, "dash": trace.line.dash}
            entries.append(f"<li>{_sample(line)}{escape(trace.name)}</li>")
    legend = f'<ul class="legend">{"".join(entries)}</ul>' if entries else ""
    data = to_json(figure).replace("<", "\\u003c")
    plot = f'<div class="plot"><script type="application/json">{data}</script></div>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{plot}</figure>"


def _analyses(runs: list[Run]) -> Iterator[str]:
    pictures = [(run, picture) for run in runs for picture in sorted((run.path / "analysis").glob("*.png"))]
    if pictures:
        yield "<section><h2>Analyses</h2>"
        for run, picture in pictures:
            yield f"<h3>{escape(picture.stem)} of {escape(run.path.name)}</h3>{_picture(picture)}"
        yield "</section>"


def _picture(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    image = f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'
    return f'<div class="picture">{image}</div>'


def _what_was_run(material: Material) -> Iterator[str]:
    yield "<section><h2>What was run</h2>"
    yield _table(environments([series for panel in material.panels.values() for series in panel.series.values()]))
    for run in material.runs:
        yield f"<details><summary>{escape(run.path.name)}</summary><pre>{escape(run.config.to_toml())}</pre></details>"
    yield "</section>"


def _table(rows: Rows) -> str:
    used = [number for number in range(len(rows[0])) if any(row[number] for row in rows[1:])]
    head, *body = [[escape(row[number]) for number in used] for row in rows]
    lines = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in body)
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
