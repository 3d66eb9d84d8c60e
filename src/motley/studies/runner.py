"""Play a study's runs one after the other. If it is stopped, the same command continues where it was.

OUT/runs/KEY/            the runs; studies that need the same run share it
OUT/NAME-SCALE/          study.json (the study and its results), table.csv, table.md
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from motley.core.errors import MotleyError
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import checkpoints
from motley.runs.folder import RunFolder
from motley.runs.run import resume_run, start_run
from motley.studies.sweep import Cell, Planned


class StudyWatcher:
    """Watches a whole study. By default every event does nothing."""

    def on_run(self, cell: Cell, run: Planned) -> Iterable[Callback]:
        """Return the callbacks of a run that begins or continues."""
        return ()

    def on_finished(self, cell: Cell, run: Planned) -> None:
        """Called after a run has finished."""

    def on_failure(self, cell: Cell, run: Planned, reason: str) -> None:
        """Called if a run was rejected; the study continues with the next one."""


def run_path(out: Path, run: Planned) -> Path:
    """Return the folder of a run."""
    return out / "runs" / run.key


def finished(out: Path, run: Planned) -> bool:
    """Return whether a run has its last checkpoint."""
    saved = checkpoints(RunFolder(run_path(out, run)).checkpoints)
    return bool(saved) and int(saved[-1].name.removeprefix("round-")) >= run.config.training.rounds


def outstanding(cells: Iterable[Cell], out: Path) -> list[tuple[Cell, Planned]]:
    """Return the runs that are not finished, each once, with the first cell that needs it; seed by seed."""
    wanted: dict[str, tuple[Cell, Planned]] = {}
    for cell in cells:
        for run in cell.runs:
            wanted.setdefault(run.key, (cell, run))
    left = [(cell, run) for cell, run in wanted.values() if not finished(out, run)]
    return sorted(left, key=lambda item: item[0].runs.index(item[1]))


def play_study(todo: Sequence[tuple[Cell, Planned]], out: Path, watcher: StudyWatcher) -> None:
    """Play runs in order. A run that is rejected is reported to the watcher and left out."""
    for cell, run in todo:
        watchers = list(watcher.on_run(cell, run))
        try:
            _play(run_path(out, run), run, watchers)
        except MotleyError as error:
            watcher.on_failure(cell, run, str(error))
        else:
            watcher.on_finished(cell, run)


def _play(path: Path, run: Planned, watchers: list[Callback]) -> None:
    folder = RunFolder(path)
    if folder.config.exists():
        resume_run(path, watchers)
    else:
        if path.exists():
            shutil.rmtree(path)  # killed before its configuration was written: there is nothing in it
        start_run(run.config, path, watchers)
    shutil.rmtree(folder.clients, ignore_errors=True)  # a finished run needs no client state
