"""`motley analyze`: run one of the analyses on finished runs."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from motley.analysis import ANALYSES, save
from motley.extras import require
from motley.files import output_folder
from motley.runs.folder import RunFolder


def analyze(
    name: str = typer.Argument(..., help="An analysis (motley list analyses)."),
    paths: list[Path] = typer.Argument(..., metavar="RUN...", help="Folders of runs."),
    out: Path | None = typer.Option(
        None, "-o", "--out", help="The folder to write to; by default analysis/ in the first run."
    ),
) -> None:
    """Analyse runs: a picture (PNG and SVG) and its numbers (CSV)."""
    analysis = ANALYSES.entry(name, "analysis")
    # Checked first: an analysis may compute for minutes before it needs matplotlib.
    require("matplotlib", "motley analyze")
    for path in paths:
        RunFolder.open(path)
    with output_folder(out or paths[0] / "analysis") as folder:
        findings = analysis.item(paths)
        for note in findings.notes:
            Console(stderr=True).print(note, highlight=False, markup=False, soft_wrap=True)
        for file in save(findings, folder, analysis.name):
            Console().print(str(file), highlight=False, markup=False, soft_wrap=True)
