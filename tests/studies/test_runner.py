"""A study is played once, however often it is killed and begun again."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from motley.studies.declaration import load_study
from motley.studies.results import collect, read_saved, save
from motley.studies.runner import StudyWatcher, finished, outstanding, play_study, run_path
from motley.studies.sweep import Cell, Planned, plan
from tests.studies.conftest import SWEEP


class Played(StudyWatcher):
    """Counts the runs that are played."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.finished: list[str] = []
        self.failures: list[str] = []

    def on_run(self, cell: Cell, run: Planned) -> tuple[()]:
        self.runs.append(run.key)
        return ()

    def on_finished(self, cell: Cell, run: Planned) -> None:
        self.finished.append(run.key)

    def on_failure(self, cell: Cell, run: Planned, reason: str) -> None:
        self.failures.append(reason)


def play(sweep: Path, out: Path) -> tuple[list[Cell], Played]:
    cells = plan(load_study(str(sweep)), "full")
    watcher = Played()
    play_study(outstanding(cells, out), out, watcher)
    return cells, watcher


def test_a_study_ends_with_a_table(sweep: Path, tmp_path: Path) -> None:
    cells, watcher = play(sweep, tmp_path / "out")
    assert len(watcher.runs) == 4
    assert watcher.finished == watcher.runs
    assert not watcher.failures
    results = collect(cells, tmp_path / "out")
    by_method = {result.cell.method: result for result in results}
    assert by_method["HeteroAvg"].ours is not None
    assert by_method["HeteroAvg"].ours.count == 2
    assert by_method["HeteroAvg"].verdict in ("within the noise", "beyond the noise")
    assert by_method["InCoAvg"].comparison is not None
    assert by_method["InCoAvg"].comparison.half_width is not None
    assert by_method["FedIN"].shown == "missing"
    folder = save(load_study(str(sweep)), "full", cells, results, tmp_path / "out")
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["method"] for row in rows] == ["HeteroAvg", "InCoAvg", "FedIN"]
    assert rows[0]["paper"] == "50.0"
    assert "no method 'not-built'" in (folder / "table.md").read_text()
    assert (folder / read_saved(folder)["cells"][0]["runs"]["1"] / "config.toml").exists()


def test_finished_runs_are_not_repeated(sweep: Path, tmp_path: Path) -> None:
    play(sweep, tmp_path)
    _, watcher = play(sweep, tmp_path)
    assert not watcher.runs


def test_runs_come_seed_by_seed(sweep: Path, tmp_path: Path) -> None:
    left = outstanding(plan(load_study(str(sweep)), "full"), tmp_path)
    assert [(cell.method, run.seed) for cell, run in left] == [
        ("HeteroAvg", 1),
        ("InCoAvg", 1),
        ("HeteroAvg", 2),
        ("InCoAvg", 2),
    ]


def test_a_folder_that_was_only_begun_is_made_anew(sweep: Path, tmp_path: Path) -> None:
    cells = plan(load_study(str(sweep)), "full")
    begun = run_path(tmp_path, cells[0].runs[0])
    begun.mkdir(parents=True)
    (begun / ".lock").touch()
    _, watcher = play(sweep, tmp_path)
    assert not watcher.failures
    assert finished(tmp_path, cells[0].runs[0])


def test_killed_half_way_it_goes_on_without_repeating(tmp_path: Path) -> None:
    sweep, out = tmp_path / "mine.toml", tmp_path / "out"
    sweep.write_text(SWEEP.replace("rounds = 3", "rounds = 30\nset.run.checkpoint_every = 1"))
    cells = plan(load_study(str(sweep)), "full")
    command = [sys.executable, "-m", "motley", "study", str(sweep), "--scale", "full", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    runs = [run for _, run in outstanding(cells, out)]
    second = run_path(out, runs[1]) / "checkpoints"
    deadline = time.monotonic() + 60
    while not (second.exists() and any(second.glob("round-*"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [run for run in runs if finished(out, run)]
    assert 1 <= len(before) < len(runs)
    stamps = {run.key: (run_path(out, run) / "metrics.jsonl").stat().st_mtime_ns for run in before}
    _, watcher = play(sweep, out)
    assert watcher.runs == [run.key for run in runs if run not in before]
    assert {run.key: (run_path(out, run) / "metrics.jsonl").stat().st_mtime_ns for run in before} == stamps
    assert all(finished(out, run) for run in runs)
