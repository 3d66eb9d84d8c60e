"""`motley analyze`: run one of the analyses on finished runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer
from rich.markup import escape

from motley.analysis import ANALYSES, save
from motley.cli.code import import_for_runs
from motley.cli.terminal import Console
from motley.cli.warnings import warn_about
from motley.config import parse_overrides
from motley.extras import require
from motley.files import output_folder
from motley.runs.folder import RunFolder
from motley.settings import validate


def analyze(
    name: str = typer.Argument(..., help="An analysis (motley list analyses)."),
    paths: list[Path] = typer.Argument(..., metavar="RUN...", help="Folders of runs."),
    set_: list[str] = typer.Option(
        [], "--set", help="A setting of the analysis, key=value (motley list analyses NAME)."
    ),
    out: Path | None = typer.Option(
        None, "-o", "--out", help="The folder to write to; by default analysis/ in the first run."
    ),
) -> None:
    """Analyse runs: a picture (PNG and SVG) and its numbers (CSV and JSON)."""
    entry = ANALYSES.entry(name, "analysis")
    settings = validate(entry.item.settings_class, parse_overrides(set_), entry.name)
    # Checked first: an analysis may compute for minutes before it needs matplotlib.
    require("matplotlib", "motley analyze")
    import_for_runs(*paths)
    for path in paths:
        RunFolder.open(path)
    warn_about(*paths)
    with output_folder(out or paths[0] / "analysis") as folder:
        with progress(Console(stderr=True)):
            findings = entry.item(paths, settings)
        for note in findings.notes:
            Console(stderr=True).print(note, highlight=False, markup=False, soft_wrap=True)
        for file in save(findings, folder, entry.name, settings):
            Console().print(str(file), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(console: Console) -> Iterator[None]:
    """Show the progress of an analysis while the block runs.

    A terminal shows the newest message in its last line. Elsewhere, each message is one line.
    """
    if console.is_terminal:
        with console.status("") as status, _messages_to(lambda text: status.update(escape(text))):
            yield
    else:
        with _messages_to(partial(console.print, highlight=False, markup=False, soft_wrap=True)):
            yield


class _Handler(logging.Handler):
    """Passes log messages to a function."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


@contextmanager
def _messages_to(show: Callable[[str], None]) -> Iterator[None]:
    logger = logging.getLogger("motley.analysis")
    level = logger.level
    handler = _Handler(show)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
