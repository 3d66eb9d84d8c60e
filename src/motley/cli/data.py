"""`motley data`: download data sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from motley.cli.commands import Command, Group
from motley.data.dataset import data_root
from motley.data.fetch import Report, fetch
from motley.data.sources import SOURCES

data = typer.Typer(
    cls=Group,
    help="Download data sets.",
    no_args_is_help=True,
    add_completion=False,
)

_NAMES = ", ".join(sorted(SOURCES))


@data.callback()
def _data() -> None:
    """Download data sets."""


@data.command("fetch", cls=Command)
def fetch_command(
    name: str = typer.Argument(..., metavar="NAME", help=f"The data set: {_NAMES}."),
    to: Path | None = typer.Option(
        None, "--to", help="The data folder. Default: $MOTLEY_DATA if it is set, else the cache."
    ),
) -> None:
    """Download a data set's published files, verify their checksums and unpack archives.

    An interrupted download continues where it stopped. Without a network, the message says which
    files to put where; the same command then verifies and unpacks them.
    """
    root = (to or data_root()).expanduser().absolute()
    console = Console()
    with _progress(console) as report:
        folder = fetch(name, root, report)
    _say(console, f"{name}: in {folder}")
    if root != data_root().absolute():
        _say(console, f"Runs find it with data.root = {str(root)!r}, or MOTLEY_DATA={root}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """Show a bar per file in a terminal, and one line per file elsewhere."""
    if not console.is_terminal:
        started: set[str] = set()

        def say_once(task: str, done: int, total: int | None) -> None:
            if task not in started:
                started.add(task)
                size = f", {total:,} bytes" if total else ""
                resumed = f", continued after {done:,}" if total and done else ""
                _say(console, task + size + resumed)

        yield say_once
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar_of: dict[str, TaskID] = {}

        def update(task: str, done: int, total: int | None) -> None:
            if task not in bar_of:
                bar_of[task] = bars.add_task(task, total=total)
            bars.update(bar_of[task], completed=done, total=total)

        yield update
