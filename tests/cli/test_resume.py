"""`motley resume --rounds`: a longer run, and warnings about settings that were changed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

from motley.config import read_resolved
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
    config.write_text(
        config.read_text().replace("rounds = 1", "rounds = 2").replace("lr = 0.001", "lr = 0.01")
    )
    answer = motley("resume", "run")
    assert answer.code == 0
    assert (
        "run/config.toml was changed after round 1: training.optimizer.lr = 0.01 (it was 0.001), "
        in answer.err
    )
    assert "training.rounds = 2 (it was 1). The run continues with the new values" in answer.err


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
    (checkpoint / "server.json").write_text(json.dumps({**metadata, "config": values}))
    answer = motley("resume", "run", "--rounds", 2)
    assert (answer.code, answer.err) == (0, "") and "round 2 of 2" in answer.out
    assert (
        "ema_decay" in config.read_text()
        and "average" not in tomllib.loads(config.read_text())["server"]
    )
    assert motley("show", "run").code == 0
