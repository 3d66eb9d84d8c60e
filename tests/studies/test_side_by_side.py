"""Several runs of a study at once: the same results as one after the other, however it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.folder import RunFolder
from motley.studies.declaration import load_study
from motley.studies.runner import finished, run_path, run_study, unfinished_runs
from motley.studies.side_by_side import run_side_by_side
from motley.studies.sweep import Cell, plan_cells
from tests.studies.conftest import SWEEP
from tests.studies.test_runner import Recorder, run_all


class Watcher(Recorder):
    """Records the progress of every run, too."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: dict[str, list[int]] = {}

    def on_progress(self, cell: Cell, run: object, rounds: int) -> None:
        self.progress.setdefault(run.key, []).append(rounds)  # type: ignore[attr-defined]


def fingerprints(cells: list[Cell], out: Path) -> dict[str, str]:
    hashes = {}
    for cell in cells:
        for run in cell.runs:
            server = load_checkpoint(run_path(out, run) / "checkpoints")
            assert server is not None
            hashes[run.key] = fingerprint(server.state)
    return hashes


def test_runs_at_once_have_the_results_of_runs_in_a_row(sweep: Path, tmp_path: Path) -> None:
    cells, _ = run_all(sweep, tmp_path / "row")
    watcher = Watcher()
    run_side_by_side(unfinished_runs(cells, tmp_path / "two"), tmp_path / "two", watcher, jobs=2)
    assert not watcher.failures
    assert sorted(watcher.finished) == sorted(watcher.runs)
    assert len(watcher.runs) == 4
    assert all(rounds[-1] == 3 for rounds in watcher.progress.values())
    assert fingerprints(cells, tmp_path / "two") == fingerprints(cells, tmp_path / "row")
    assert not unfinished_runs(cells, tmp_path / "two")


def test_each_run_has_its_share_of_the_cores(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.studies.side_by_side.available_cores", lambda: 4)
    cells = plan_cells(load_study(str(sweep)), "full", seeds=1)
    todo = unfinished_runs(cells, tmp_path)
    run_side_by_side(todo, tmp_path, Watcher(), jobs=2)
    for _, run in todo:
        assert RunFolder(run_path(tmp_path, run)).read_config().engine.workers == 2


def test_a_run_that_is_rejected_does_not_stop_the_others(tmp_path: Path) -> None:
    sweep = tmp_path / "mine.toml"
    method = (
        '[[methods]]\nname = "broken"\nset.method.name = "moon"\nset.engine.device = "cuda:9"\n'
    )
    sweep.write_text(SWEEP.replace("seeds = [1, 2]", "seeds = [1]") + "\n" + method)
    cells = plan_cells(load_study(str(sweep)), "full")
    watcher = Watcher()
    run_side_by_side(unfinished_runs(cells, tmp_path / "out"), tmp_path / "out", watcher, jobs=3)
    assert len(watcher.finished) == 2
    (reason,) = watcher.failures
    assert reason.startswith("engine.device = 'cuda:9': there is no cuda:9 on this machine")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's notice of a parent's death")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_study_that_is_stopped_continues(tmp_path: Path, how: signal.Signals) -> None:
    sweep, out = tmp_path / "mine.toml", tmp_path / "out"
    sweep.write_text(SWEEP.replace("rounds = 3", "rounds = 60\nset.run.checkpoint_every = 5"))
    cells = plan_cells(load_study(str(sweep)), "full", seeds=1)
    runs = [run for _, run in unfinished_runs(cells, out)]
    command = [sys.executable, "-m", "motley", "study", str(sweep), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--seeds", "1", "--jobs", "2"], stdout=subprocess.DEVNULL, env=os.environ
    )
    folders = [RunFolder(run_path(out, run)) for run in runs]
    wait_for(lambda: all(any(folder.checkpoints.glob("round-*")) for folder in folders))
    process.send_signal(how)
    process.wait()
    # The runs end by themselves, each after saving a checkpoint.
    wait_for(lambda: not any(folder.is_locked() for folder in folders))
    assert not all(finished(out, run) for run in runs)
    subprocess.run([*command, "--seeds", "1"], check=True, stdout=subprocess.DEVNULL)
    run_study(unfinished_runs(cells, tmp_path / "whole"), tmp_path / "whole", Watcher())
    assert fingerprints(cells, out) == fingerprints(cells, tmp_path / "whole")


def wait_for(condition: object, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
