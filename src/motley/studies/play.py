"""Play a study's runs one after the other; whatever stops it, the same command goes on where it was.

OUT/runs/KEY/            the runs; studies that want the same run share it
OUT/NAME-SCALE/          study.json (what was asked and found), table.csv, table.md
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from motley.errors import MotleyError
from motley.runs.checkpoint import checkpoints
from motley.runs.folder import RunFolder
from motley.runs.play import Callback, begin, resume
from motley.studies.sweep import Cell, Planned


class StudyWatcher:
    """Something that watches a whole study. Each event has a default that does nothing."""

    def on_run(self, cell: Cell, run: Planned) -> Iterable[Callback]:
        """A run begins or goes on; return what watches it."""
        return ()

    def on_failure(self, cell: Cell, run: Planned, reason: str) -> None:
        """A run was refused; the study goes on with the next."""


def run_path(out: Path, run: Planned) -> Path:
    """Return the folder of a run."""
    return out / "runs" / run.key


def finished(out: Path, run: Planned) -> bool:
    """Tell whether a run has its last checkpoint."""
    saved = checkpoints(RunFolder(run_path(out, run)).checkpoints)
    return bool(saved) and int(saved[-1].name.removeprefix("round-")) >= run.config.training.rounds


def outstanding(cells: Iterable[Cell], out: Path) -> list[tuple[Cell, Planned]]:
    """Return the runs that are not finished, each once, with the first cell that asks for it; seed by seed."""
    wanted: dict[str, tuple[Cell, Planned]] = {}
    for cell in cells:
        for run in cell.runs:
            wanted.setdefault(run.key, (cell, run))
    left = [(cell, run) for cell, run in wanted.values() if not finished(out, run)]
    return sorted(left, key=lambda item: item[0].runs.index(item[1]))


def play_study(todo: Sequence[tuple[Cell, Planned]], out: Path, watcher: StudyWatcher) -> None:
    """Play runs in order; one that is refused is told and left out."""
    for cell, run in todo:
        watchers = list(watcher.on_run(cell, run))
        try:
            _play(run_path(out, run), run, watchers)
        except MotleyError as error:
            watcher.on_failure(cell, run, str(error))


def _play(path: Path, run: Planned, watchers: list[Callback]) -> None:
    folder = RunFolder(path)
    if folder.config.exists():
        resume(path, watchers)
    else:
        if path.exists():
            shutil.rmtree(path)  # killed before it had a configuration: there is nothing in it
        begin(run.config, path, watchers)
    shutil.rmtree(folder.clients, ignore_errors=True)  # nobody asks a finished run's clients what they remember
