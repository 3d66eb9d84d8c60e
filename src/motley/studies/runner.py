"""Run a study, one run after the other, or several at once (`side_by_side.py`).

If it is stopped, the same command continues it.

OUT/runs/KEY/            the runs; studies that need the same run share it
OUT/NAME-SCALE/          study.json (the study and its results), table.csv, table.md
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.own_code import failure_in_own_code
from motley.federation import Federation
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import last_round
from motley.runs.folder import RunFolder
from motley.runs.plugins import changed_plugins
from motley.runs.run import resume_run, start_run
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.studies.sweep import Cell, PlannedRun


class StudyWatcher:
    """Watches a whole study. By default every event does nothing."""

    def on_run(self, cell: Cell, run: PlannedRun) -> None:
        """Called before a run is started or resumed."""

    def on_progress(self, cell: Cell, run: PlannedRun, rounds: int) -> None:
        """Called when a run begins or continues, and after its rounds: `rounds` are completed."""

    def on_finished(self, cell: Cell, run: PlannedRun) -> None:
        """Called after a run has finished."""

    def on_failure(self, cell: Cell, run: PlannedRun, reason: str) -> None:
        """Called if a run was rejected or failed. The study continues with the next run."""


def run_path(out: Path, run: PlannedRun) -> Path:
    """Return the folder of a run."""
    return out / "runs" / run.key


def finished(out: Path, run: PlannedRun) -> bool:
    """Return whether a run has its last checkpoint."""
    folder = RunFolder(run_path(out, run))
    return last_round(folder.checkpoints) >= run.config.training.rounds


def unfinished_runs(cells: Iterable[Cell], out: Path) -> list[tuple[Cell, PlannedRun]]:
    """Return the runs that are not finished, each with the first cell that needs it.

    The first seed of every cell comes before the second of any cell, so that a study that is
    stopped early has results for as many cells as possible.
    """
    needed: dict[str, tuple[Cell, PlannedRun]] = {}
    for cell in cells:
        for run in cell.runs:
            needed.setdefault(run.key, (cell, run))
    unfinished = [(cell, run) for cell, run in needed.values() if not finished(out, run)]
    return sorted(unfinished, key=lambda item: item[0].runs.index(item[1]))


def runs_of_other_code(
    todo: Iterable[tuple[Cell, PlannedRun]], out: Path
) -> list[tuple[Path, str]]:
    """Return the folders of runs that differ from unfinished ones only in the user's own code.

    Each comes with a sentence that names the file that has changed.
    """
    others = []
    for _, run in todo:
        for folder in sorted((out / "runs").glob(f"{run.key_of_settings}*")):
            sentences = changed_plugins(folder, run.config)
            if folder.name != run.key and sentences:
                others.append((folder, " ".join(sentences)))
    return others


def run_study(todo: Sequence[tuple[Cell, PlannedRun]], out: Path, watcher: StudyWatcher) -> None:
    """Run everything in order.

    A run that is rejected, or in which a user's own code fails, is reported to the watcher and
    skipped.
    """
    for cell, run in todo:
        watcher.on_run(cell, run)
        try:
            start_or_resume(run_path(out, run), run.config, [_Progress(watcher, cell, run)])
        except MotleyError as error:
            watcher.on_failure(cell, run, str(error))
        except Exception as error:
            reason = failure_in_own_code(error)
            if reason is None:
                raise
            watcher.on_failure(cell, run, reason)
        else:
            watcher.on_finished(cell, run)


class _Progress(Callback):
    """Tells a study's watcher about the rounds of one run."""

    def __init__(self, watcher: StudyWatcher, cell: Cell, run: PlannedRun) -> None:
        self.watcher, self.cell, self.run = watcher, cell, run

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.watcher.on_progress(self.cell, self.run, server.round_number)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        self.watcher.on_progress(self.cell, self.run, server.round_number)


def start_or_resume(path: Path, config: Config, callbacks: Sequence[Callback] = ()) -> None:
    """Start the run of a configuration in its folder, or resume it, and run it to its end."""
    folder = RunFolder(path)
    if folder.config.exists():
        resume_run(path, callbacks)
    else:
        if path.exists():
            # The process was killed before the configuration was written: the folder is empty.
            shutil.rmtree(path)
        start_run(config, path, callbacks)
    # A finished run needs no client state.
    shutil.rmtree(folder.clients, ignore_errors=True)
