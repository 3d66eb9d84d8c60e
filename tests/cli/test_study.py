"""`motley study`, called as a command."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.studies.declaration import load_study
from tests.cli.conftest import Command
from tests.studies.conftest import SWEEP


def test_the_list_names_studies(motley: Command) -> None:
    answer = motley("study", "--list")
    assert answer.code == 0
    assert "inco-table2" in answer.out
    assert answer.out.splitlines()[1].startswith("demo ")
    assert "Start here: motley study demo" in answer.out
    assert motley("study").out == answer.out
    assert "model.weights" in answer.out  # what a study lacks


def test_a_plan_runs_nothing(motley: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SWEEP)
    answer = motley("study", "mine.toml", "--plan")
    assert answer.code == 0
    assert "missing: " in answer.out and "there is no method 'not-built'" in answer.out
    assert "to go" in answer.out
    assert not (tmp_path / "runs").exists()


def test_nothing_to_run_is_an_error(motley: Command) -> None:
    answer = motley("study", "fedimpro-table8")
    assert answer.code == 2
    assert "missing: femnist" in answer.out
    assert "none of it can run here" in answer.err


def test_a_sweep_of_ones_own(motley: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SWEEP)
    answer = motley("study", "mine.toml", "--out", "out")
    assert answer.code == 0, answer.err
    assert "scale full (all rounds, all seeds): 4 runs" in answer.out
    assert "shortened" not in answer.out
    assert "run 4/4: InCoAvg, digits, alpha 1, seed 2" in answer.out
    assert "50 ± 2" in answer.out
    assert "HeteroAvg: " in answer.out
    assert "missing: FedIN" in answer.out
    assert "the noise)" in answer.out
    again = motley("study", "mine.toml", "--scale", "full", "--out", "out")
    assert "4 runs, 4 finished, 0 to go" in again.out
    assert again.err == ""


def test_runs_that_were_changed_afterwards_are_named_with_the_results(
    motley: Command, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(SWEEP)
    study = ("study", "mine.toml", "--out", "out", "--seeds", "1")
    assert motley(*study).code == 0
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    edited, cut = runs[0] / "config.toml", runs[1] / "metrics.jsonl"
    edited.write_text(edited.read_text().replace("seed = 1", "seed = 8"))
    lines = cut.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[1:]))
    answer = motley(*study)
    assert answer.code == 0
    assert "config.toml was changed after round" in answer.err
    assert "seed = 8 (it was 1)" in answer.err
    assert "metrics.jsonl: the line of round 1 is missing." in answer.err


def test_one_seed_is_marked_and_a_papers_table_runs_end_to_end(motley: Command) -> None:
    answer = motley(
        *("study", "inco-table2", "--data", "digits", "--out", "out"),
        *("--set", "training.rounds=2", "--set", "training.epochs=1"),
    )
    assert answer.code == 0, answer.err
    assert "scale quick (a tenth of the rounds, one seed)" in answer.out
    assert "This is a shortened study" in answer.out
    assert "InCoMoon" in answer.out
    assert "HeteroAvg: " in answer.out
    assert answer.out.count("(one seed)") >= 30
    assert Path("out/inco-table2-quick/table.csv").exists()


def test_the_users_own_data_beside_the_study(motley: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    np.savez(
        tmp_path / "mine" / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels
    )
    text = SWEEP.replace('name = "digits"', 'name = "npz"').replace("paper.digits", "paper.npz")
    (tmp_path / "mine" / "own.toml").write_text(
        text.replace("seeds =", 'set.data.path = "a.npz"\nseeds =')
    )
    answer = motley("study", "mine/own.toml", "--seeds", "1", "--out", "out")
    assert answer.code == 0, answer.err
    assert "run 2/2: InCoAvg, npz, alpha 1, seed 1" in answer.out


def test_the_demo_shows_every_line(motley: Command) -> None:
    answer = motley(
        "study", "demo", "--set", "training.rounds=2", "--set", "training.epochs=1", "--seeds", "1"
    )
    assert answer.code == 0, answer.err
    assert "missing" not in answer.out
    table = (Path("runs/studies/demo-full") / "table.md").read_text()
    assert all(row.name in table for row in load_study("demo").methods)
    assert "not run" not in table and "not reached" not in table
