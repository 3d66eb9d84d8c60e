"""`motley bench`: measured rounds, a JSON file, and the comparison of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motley.bench import Timing, measure, save, synthetic_dataset
from motley.cli import app
from motley.core.errors import MotleyError
from tests.conftest import TINY, tiny_config


def test_a_timing_accounts_for_the_whole_round() -> None:
    # One round, because its median is then its mean, whatever else the machine does.
    timing = measure(tiny_config("training.steps=2"), "tiny", rounds=1, warm_up=1)
    assert timing.ms_round > 0 and timing.peak_mb > 0
    assert sum(timing.share.values()) == pytest.approx(1.0, abs=0.02)
    assert timing.share["train"] > timing.share["merge"]
    steps = 4 * 2  # clients per round, steps per client
    assert timing.ms_client_step * steps == pytest.approx(
        timing.ms_round * timing.share["train"], rel=0.01
    )


def test_the_command_writes_what_it_prints_and_compares_it(tmp_path: Path) -> None:
    overrides = [word for override in (*TINY, "training.steps=1") for word in ("--set", override)]
    numbers = tmp_path / "a.json"
    result = CliRunner().invoke(
        app,
        ["bench", "--rounds", "1", "--warm-up", "0", "--json", str(numbers), *overrides],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    written = json.loads(numbers.read_text())
    assert f"{written['timings'][0]['ms_round']:.1f}" in result.output
    assert written["environment"]["torch"]


def test_two_files_are_compared_by_setting(tmp_path: Path) -> None:
    slow = Timing("a", 3, 200.0, 1.0, 1.0, 10.0, {"train": 1.0}, 1.0)
    fast = Timing("a", 3, 50.0, 1.0, 1.0, 10.0, {"train": 1.0}, 1.0)
    save(tmp_path / "old.json", [slow])
    save(tmp_path / "new.json", [fast])
    files = ["--compare", str(tmp_path / "old.json"), "--compare", str(tmp_path / "new.json")]
    result = CliRunner().invoke(app, ["bench", *files])
    assert "4.00" in result.output


def test_a_file_without_timings_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    result = CliRunner().invoke(
        app, ["bench", "--compare", str(tmp_path / "x.json"), "--compare", "y.json"]
    )
    assert isinstance(result.exception, MotleyError)
    assert "x.json" in str(result.exception)


def test_synthetic_data_sets_have_the_shape_of_the_real_ones() -> None:
    with pytest.raises(MotleyError, match="digits"):
        synthetic_dataset("digits")
    assert synthetic_dataset("fashion-mnist").train.inputs.shape == (60_000, 28, 28, 1)
