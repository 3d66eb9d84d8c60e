"""Every run of a study is run once, even if the study is killed and started again."""

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
from motley.studies.runner import StudyWatcher, finished, run_path, run_study, unfinished_runs
from motley.studies.sweep import Cell, PlannedRun, plan_cells
from tests.studies.conftest import SWEEP


class Recorder(StudyWatcher):
    """Records the runs that are started."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.finished: list[str] = []
        self.failures: list[str] = []

    def on_run(self, cell: Cell, run: PlannedRun) -> tuple[()]:
        self.runs.append(run.key)
        return ()

    def on_finished(self, cell: Cell, run: PlannedRun) -> None:
        self.finished.append(run.key)

    def on_failure(self, cell: Cell, run: PlannedRun, reason: str) -> None:
        self.failures.append(reason)


def run_all(sweep: Path, out: Path) -> tuple[list[Cell], Recorder]:
    cells = plan_cells(load_study(str(sweep)), "full")
    watcher = Recorder()
    run_study(unfinished_runs(cells, out), out, watcher)
    return cells, watcher


def test_a_study_ends_with_a_table(sweep: Path, tmp_path: Path) -> None:
    cells, watcher = run_all(sweep, tmp_path / "out")
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
    run_all(sweep, tmp_path)
    _, watcher = run_all(sweep, tmp_path)
    assert not watcher.runs


def test_runs_are_sorted_by_seed(sweep: Path, tmp_path: Path) -> None:
    todo = unfinished_runs(plan_cells(load_study(str(sweep)), "full"), tmp_path)
    assert [(cell.method, run.seed) for cell, run in todo] == [
        ("HeteroAvg", 1),
        ("InCoAvg", 1),
        ("HeteroAvg", 2),
        ("InCoAvg", 2),
    ]


def test_a_folder_without_a_configuration_is_replaced(sweep: Path, tmp_path: Path) -> None:
    cells = plan_cells(load_study(str(sweep)), "full")
    folder = run_path(tmp_path, cells[0].runs[0])
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    _, watcher = run_all(sweep, tmp_path)
    assert not watcher.failures
    assert finished(tmp_path, cells[0].runs[0])


def test_a_killed_study_continues_without_repeating_runs(tmp_path: Path) -> None:
    sweep, out = tmp_path / "mine.toml", tmp_path / "out"
    sweep.write_text(SWEEP.replace("rounds = 3", "rounds = 30\nset.run.checkpoint_every = 1"))
    cells = plan_cells(load_study(str(sweep)), "full")
    command = [
        sys.executable,
        "-m",
        "motley",
        "study",
        str(sweep),
        "--scale",
        "full",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    runs = [run for _, run in unfinished_runs(cells, out)]
    second = run_path(out, runs[1]) / "checkpoints"
    deadline = time.monotonic() + 60
    while not (second.exists() and any(second.glob("round-*"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [run for run in runs if finished(out, run)]
    assert 1 <= len(before) < len(runs)

    def modification_times() -> list[int]:
        return [(run_path(out, run) / "metrics.jsonl").stat().st_mtime_ns for run in before]

    times = modification_times()
    _, watcher = run_all(sweep, out)
    assert watcher.runs == [run.key for run in runs if run not in before]
    assert modification_times() == times
    assert all(finished(out, run) for run in runs)
