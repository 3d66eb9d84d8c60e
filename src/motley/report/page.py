"""The page: one HTML file with everything in it, script and figures included. Nothing is fetched from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.report.material import Material, Panel, Run
from motley.report.tables import Rows, costs, environments, final
from motley.studies.results import COLUMNS

try:
    from plotly.io import to_json
    from plotly.offline import get_plotlyjs

    from motley.report import figures
except ImportError:
    raise MotleyError("the report draws with plotly, which is not installed: pip install 'motleyfl[report]'.") from None


def render(material: Material, title: str, *, live: bool = False) -> str:
    """Return the page. A live one takes plotly from its own server and looks for news there."""
    body = "\n".join(_body(material))
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


def _body(material: Material) -> Iterator[str]:
    for study in material.studies:
        yield from _study(study)
    if len(material.labels) > 1:
        yield '<nav id="series" aria-label="Show or hide">' + "".join(_chip(material.labels)) + "</nav>"
    for number, panel in enumerate(material.panels.values()):
        yield f'<details class="panel"{" open" if number == 0 else ""}><summary>{escape(panel.title)}</summary>'
        yield from _panel(panel, material.labels)
        yield "</details>"
    yield from _analyses(material.runs)
    yield from _what_was_run(material)


def _chip(labels: list[str]) -> Iterator[str]:
    for number, label in enumerate(labels):
        colour = figures.style(number)["color"]
        yield (
            f'<label style="--colour: {colour}"><input type="checkbox" checked value="{escape(label)}">'
            f"{escape(label)}</label>"
        )


def _study(study: dict[str, Any]) -> Iterator[str]:
    yield f"<section><h2>{escape(study['name'])}: {escape(study['summary'])}</h2>"
    note = f" {escape(study['note'])}" if study["note"] else ""
    yield f"<p>{escape(study['paper'])}. Scale {study['scale']}: {escape(study['scale_means'])}.{note}</p>"
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
    sizes = panel.sizes if len(panel.sizes) > 2 else panel.sizes[:1]
    drawn = [figures.accuracy(panel, size, labels) for size in sizes]
    drawn.append(figures.traffic(panel, labels))
    for series in panel.series.values():
        drawn += [figure for name in figures.NAMES if (figure := figures.coefficients(series, name)) is not None]
    drawn += figures.own_numbers(panel, labels)
    said = ""
    try:
        drawn.append(figures.partition(next(panel.runs())))
    except MotleyError as error:
        said = f"<p>The partition cannot be drawn here: {escape(str(error).splitlines()[0])}</p>"
    yield '<div class="figures">' + "".join(map(_figure, drawn)) + f"</div>{said}"
    yield f"<h3>Accuracy, %</h3>{_table(final(panel))}<h3>Rounds, traffic and time</h3>{_table(costs(panel))}"


def _figure(figure: Any) -> str:
    figure.update_layout(template="none")
    data = to_json(figure).replace("<", "\\u003c")
    return f'<figure><script type="application/json">{data}</script></figure>'


def _analyses(runs: list[Run]) -> Iterator[str]:
    pictures = [(run, picture) for run in runs for picture in sorted((run.path / "analysis").glob("*.png"))]
    if pictures:
        yield "<section><h2>Analyses</h2>"
        for run, picture in pictures:
            yield f"<h3>{escape(picture.stem)} of {escape(run.path.name)}</h3>{_picture(picture)}"
        yield "</section>"


def _picture(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'


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
