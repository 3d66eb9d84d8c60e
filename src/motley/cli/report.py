"""`motley report`: one HTML page about runs and studies."""

from __future__ import annotations

from pathlib import Path

import typer

from motley.cli.code import import_for_runs
from motley.cli.terminal import Console
from motley.cli.warnings import warn_about
from motley.extras import require
from motley.files import is_stream, output_file
from motley.report.report_data import gather


def report(
    paths: list[Path] = typer.Argument(
        ..., metavar="RUN-or-STUDY...", help="Folders of runs or of studies."
    ),
    out: Path = typer.Option(Path("report.html"), "-o", "--out", help="The file to write."),
    title: str = typer.Option("", help="The page's title; by default the folders' names."),
) -> None:
    """Write one self-contained HTML page: curves, tables, traffic, partition, configurations.

    InCo's coefficients are included if a run used InCo.
    """
    require("plotly", "motley report")
    from motley.report.page import render

    import_for_runs(*paths)
    warn_about(*paths)
    with output_file(out) as file:
        page = render(gather(paths), title or ", ".join(path.resolve().name for path in paths))
        file.write(page.encode())
    Console(stderr=is_stream(out)).print(
        f"{out}: {len(page) / 1e6:.1f} MB", highlight=False, markup=False, soft_wrap=True
    )
