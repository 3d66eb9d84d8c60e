"""`motley resume --rounds`: a longer run, and warnings about settings that were changed."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from motley.config import read_resolved
from motley.data import load_dataset
from tests.cli.conftest import Command, overrides

SMALL = (
    "model.sizes=resnet10",
    "federation.clients_per_round=2",
    "run.tensorboard=false",
    "training.steps=1",
)


def timeless(run: Path) -> list[dict[str, object]]:
    """Return a run's metrics without the seconds."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    return lines


def start(motley: Command, run: Path, *more: str) -> None:
    answer = motley("run", *overrides(*SMALL, *more), "--out", run)
    assert answer.code == 0, answer.err


def test_an_extended_run_ends_as_one_that_was_long_from_the_start(
    motley: Command, tmp_path: Path
) -> None:
    start(motley, tmp_path / "long", "training.rounds=5")
    start(motley, tmp_path / "short", "training.rounds=2")
    answer = motley("resume", "short", "--rounds", 5)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("5 rounds on cpu, continuing after round 2\nround 3/5  ")
    assert (
        motley("show", "short", "--fingerprint").out == motley("show", "long", "--fingerprint").out
    )
    assert timeless(tmp_path / "short") == timeless(tmp_path / "long")
    assert (tmp_path / "short" / "config.toml").read_text() == (
        tmp_path / "long" / "config.toml"
    ).read_text()


def test_rounds_that_were_played_cannot_be_undone(motley: Command, tmp_path: Path) -> None:
    start(motley, tmp_path / "run", "training.rounds=2")
    before = (tmp_path / "run" / "config.toml").read_text()
    answer = motley("resume", "run", "--rounds", 1)
    assert answer == (2, "", "motley: --rounds 1: run has already completed 2 rounds.\n")
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert "This run is already finished." in motley("resume", "run", "--rounds", 2).out
    assert motley("resume", "run", "--rounds", 0).code == 2


def test_a_run_can_be_made_shorter_before_its_end(motley: Command, tmp_path: Path) -> None:
    start(motley, tmp_path / "run", "training.rounds=2")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 9"))
    answer = motley("resume", "run", "--rounds", 3)
    assert answer.code == 0 and "round 3 of 3" in answer.out
    assert read_resolved(config).training.rounds == 3


def test_a_method_that_plans_with_all_rounds_is_warned_about(
    motley: Command, tmp_path: Path
) -> None:
    more = (
        "method.name=scalefl",
        "split.name=grid",
        "model.sizes=resnet18",
        "federation.clients=6",
    )
    start(motley, tmp_path / "run", *more, "training.rounds=1")
    answer = motley("resume", "run", "--rounds", 2)
    assert answer.code == 0
    assert (
        "motley: warning: scalefl schedules its training by the total number of rounds"
        in answer.err
    )


def test_settings_that_were_edited_are_named(motley: Command, tmp_path: Path) -> None:
    start(motley, tmp_path / "run", "training.rounds=1")
    config = tmp_path / "run" / "config.toml"
    original = config.read_text()
    config.write_text(original.replace("rounds = 1", "rounds = 2"))
    edit = "run/config.toml was changed after round 1: training.rounds = 2 (it was 1)."
    assert edit in motley("show", "run").err
    answer = motley("resume", "run")
    assert answer.code == 0
    assert f"motley: warning: {edit} The run continues with it.\n" == answer.err
    assert motley("show", "run").err == "", "the change was recorded"


def test_settings_that_change_the_training_are_refused(motley: Command, tmp_path: Path) -> None:
    start(motley, tmp_path / "run", "training.rounds=1")
    config = tmp_path / "run" / "config.toml"
    original = config.read_text()
    config.write_text(original.replace("lr = 0.001", "lr = 0.01").replace("seed = 1", "seed = 7"))
    by_hand = motley("resume", "run", "--rounds", 2)
    config.write_text(original)
    by_option = motley("resume", "run", "--set", "training.optimizer.lr=0.01", "--set", "seed=7")
    for answer in (by_hand, by_option):
        assert answer.code == 2
        assert "training.optimizer.lr = 0.01: rounds 1 to 1 ran with 0.001." in answer.err
        assert "seed = 7: rounds 1 to 1 ran with 1." in answer.err
        assert "motley run run/config.toml --out FOLDER" in answer.err
    assert config.read_text() == original
    assert [line["round"] for line in timeless(tmp_path / "run")] == [1]


def test_settings_without_an_effect_on_the_training_can_be_changed(
    motley: Command, tmp_path: Path
) -> None:
    start(motley, tmp_path / "plain", "training.rounds=4")
    start(motley, tmp_path / "run", "training.rounds=2")
    changes = ("training.rounds=4", "run.keep_checkpoints=1", "engine.name=debug")
    words = [word for change in changes for word in ("--set", change)]
    answer = motley("resume", "run", *words)
    assert (answer.code, answer.err) == (0, "")
    assert (
        motley("show", "run", "--fingerprint").out == motley("show", "plain", "--fingerprint").out
    )
    config = read_resolved(tmp_path / "run" / "config.toml")
    assert (config.training.rounds, config.run.keep_checkpoints) == (4, 1)
    recorded = (tmp_path / "run" / "changes.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in recorded] == [
        {"round": 2, "setting": "engine.name", "old": "local", "new": "debug"},
        {"round": 2, "setting": "run.keep_checkpoints", "old": 2, "new": 1},
        {"round": 2, "setting": "training.rounds", "old": 2, "new": 4},
    ]
    assert motley("show", "run").err == ""
    answer = motley("resume", "run", "--set", "training.rounds=3")
    assert "--set training.rounds 3: run has already completed 4 rounds." in answer.err
    answer = motley("resume", "run", "--set", "training.roundz=3")
    assert answer.code == 2 and "unknown key" in answer.err


def test_a_run_without_a_checkpoint_can_be_changed_in_every_way(
    motley: Command, tmp_path: Path
) -> None:
    start(motley, tmp_path / "run", "training.rounds=1")
    start(motley, tmp_path / "plain", "training.rounds=1", "seed=7")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert motley("resume", "run", "--set", "seed=7").code == 0
    assert timeless(tmp_path / "run") == timeless(tmp_path / "plain")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("engine.device=tpu", "engine.device = 'tpu'"),
        ("engine.device=cuda:7", "engine.device = 'cuda:7'"),
        ("data.path=moved.npz", "data set 'digits' takes no path"),
    ],
)
def test_settings_that_a_run_cannot_be_opened_with_are_not_saved(
    motley: Command, tmp_path: Path, override: str, problem: str
) -> None:
    """A misspelt device in config.toml would make every later command on the run fail."""
    start(motley, tmp_path / "run", "training.rounds=1")
    config = tmp_path / "run" / "config.toml"
    original = config.read_text()
    answer = motley("resume", "run", "--rounds", 2, "--set", override)
    assert answer.code == 2 and problem in answer.err
    assert config.read_text() == original
    assert not (tmp_path / "run" / "changes.jsonl").exists()
    assert motley("resume", "run", "--rounds", 2).code == 0


def test_a_setting_that_the_method_did_not_have_is_named_in_words(
    motley: Command, tmp_path: Path
) -> None:
    start(motley, tmp_path / "run", "training.rounds=1")
    answer = motley("resume", "run", "--set", "method.name=fedprox")
    assert "method.mu = 0.1: rounds 1 to 1 ran without it." in answer.err
    assert "None" not in answer.err


def test_other_data_are_refused_unless_they_are_accepted(motley: Command, tmp_path: Path) -> None:
    digits = load_dataset("digits")
    arrays = {
        "x_train": digits.train.inputs[:200],
        "y_train": digits.train.targets[:200],
        "x_test": digits.test.inputs[:50],
        "y_test": digits.test.targets[:50],
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    np.savez_compressed(tmp_path / "moved.npz", **arrays)
    start(motley, tmp_path / "run", "training.rounds=1", "data.name=npz", "data.path=mine.npz")
    answer = motley("resume", "run", "--rounds", 2, "--set", "data.path=moved.npz")
    assert (answer.code, answer.err) == (0, ""), "the file is another one, its content the same"
    arrays["y_test"] = arrays["y_test"][::-1]
    np.savez(tmp_path / "moved.npz", **arrays)
    answer = motley("resume", "run", "--rounds", 3)
    assert answer.code == 2
    assert "the test examples are not those of rounds 1 to 2. Restore the data" in answer.err
    assert "motley resume run --rounds 3 --accept data" in answer.err
    assert motley("resume", "run", "--rounds", 3, "--accept", "data").code == 0
    assert '"accepted": "data"' in (tmp_path / "run" / "changes.jsonl").read_text()


def test_changes_of_the_metrics_are_refused_unless_they_are_accepted(
    motley: Command, tmp_path: Path
) -> None:
    start(motley, tmp_path / "run", "training.rounds=3")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([lines[0], lines[2]]))
    problem = "run/metrics.jsonl: the line of round 2 is missing."
    assert problem in motley("show", "run").err
    answer = motley("resume", "run", "--rounds", 4)
    assert answer.code == 2 and problem in answer.err
    assert "motley resume run --rounds 4 --accept metrics" in answer.err
    assert motley("resume", "run", "--rounds", 4, "--accept", "metrics").code == 0
    assert [line["round"] for line in timeless(tmp_path / "run")] == [1, 3, 4]
    recorded = (tmp_path / "run" / "changes.jsonl").read_text()
    assert '"accepted": "metrics"' in recorded and problem in recorded
    assert motley("resume", "run", "--accept", "seed").err == (
        "motley: --accept seed: should be metrics or data.\n"
    )


@pytest.mark.parametrize("extended", [False, True])
def test_an_undisturbed_run_gets_no_warning(
    motley: Command, tmp_path: Path, extended: bool
) -> None:
    start(motley, tmp_path / "run", "training.rounds=1")
    assert motley("resume", "run", *(["--rounds", 2] if extended else [])).err == ""


def test_a_run_with_the_names_of_an_earlier_version_is_resumed(
    motley: Command, tmp_path: Path
) -> None:
    """Its configuration and its checkpoints have old names, and settings that have no effect."""
    start(motley, tmp_path / "run", "training.rounds=1")
    config = tmp_path / "run" / "config.toml"
    values = tomllib.loads(config.read_text())
    values["server"]["average"] = values["server"].pop("ema_decay")
    values["method"]["inco"] = {"preset": "off", "epsilon": 1e-7}
    values["model"]["vit"] = {"patch": 16}
    config.write_text(tomli_w.dumps(values))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    metadata = json.loads((checkpoint / "server.json").read_text())
    for name in ("sha256", "section_sha256", "facts"):
        del metadata[name]
    (checkpoint / "server.json").write_text(json.dumps({**metadata, "config": values}))
    answer = motley("resume", "run", "--rounds", 2)
    assert (answer.code, answer.err) == (0, "") and "round 2 of 2" in answer.out
    assert (
        "ema_decay" in config.read_text()
        and "average" not in tomllib.loads(config.read_text())["server"]
    )
    assert motley("show", "run").code == 0
