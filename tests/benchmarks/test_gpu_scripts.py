"""Scripts that measure on a GPU keep what they have measured if a part of them fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_round, rounds, step_profile


def run_main(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["script", *arguments])
    script.main()


def test_rounds_goes_on_after_a_variant_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(preset: str, overrides: list[str], *_: Any) -> dict[str, Any]:
        if "training.optimizer.lr=1" in overrides:
            raise RuntimeError("out of registers")
        best = [3.0, 2.0] if "engine.slots=3" in overrides else [2.0, 1.0]
        return {"first_round_s": 1.0, "median": 2.5, "mean": 2.5, "best": best}

    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(rounds, "synthetic_dataset", lambda name: None)
    output = tmp_path / "rounds.json"
    variants = ("bad: training.optimizer.lr=1", "plain:", "three: engine.slots=3")
    flags = [flag for variant in variants for flag in ("--variant", variant)]
    run_main(rounds, monkeypatch, "--output", str(output), "--rounds", "2", *flags)
    results = json.loads(output.read_text())["results"]
    assert results["bad"]["error"] == "RuntimeError: out of registers"
    assert (results["plain"]["ratio"], results["three"]["ratio"]) == (1, 1.75)
    assert "out of registers" in capsys.readouterr().out


def test_rounds_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Federation:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def initial_state(self) -> None: ...

    monkeypatch.setattr(rounds, "Federation", Federation)
    monkeypatch.setattr(rounds, "synthetic_dataset", lambda name: None)
    output = tmp_path / "rounds.json"
    run_main(rounds, monkeypatch, "--output", str(output), "--variant", "plain:", "--seconds", "0")
    result = json.loads(output.read_text())["results"]["plain"]
    assert result["error"] == "TimeoutError: out of time in round 1 of 25"


def test_rounds_stops_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Record:
        def read(self) -> None: ...

    class Federation:
        """Takes a second per round."""

        now = 0.0

        def initial_state(self) -> None: ...

        def queue_round(self, server: None, *, more_rounds: bool) -> tuple[None, Record]:
            self.now += 1
            return None, Record()

    federation: Any = Federation()
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: federation.now)
    assert rounds.play(federation, 3, latest=100) == [1000, 1000, 1000]
    with pytest.raises(TimeoutError, match="out of time in round 4 of 9"):
        rounds.play(federation, 9, latest=5.5)


@pytest.mark.parametrize("failing", ["plain", "profiled"])
def test_first_round_keeps_the_process_that_has_finished(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_child(child: str, *_: Any) -> dict[str, Any]:
        if child == failing:
            raise subprocess.TimeoutExpired(child, 1)
        return {"seconds": {"first round": 2.0}, "functions": []}

    monkeypatch.setattr(first_round, "run_child", run_child)
    output = tmp_path / "first.json"
    run_main(first_round, monkeypatch, "--output", str(output))
    results = json.loads(output.read_text())
    assert set(results) == {"plain", "profiled"}
    assert "TimeoutExpired" in results[failing].pop("error") and not results[failing]


def test_first_round_is_cut_off_in_time() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        first_round.run_child("plain", keep_cache=True, seconds=0)


def test_step_profile_keeps_times_without_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_profile(slot: object) -> None:
        raise RuntimeError("torch's profiler saw no kernels")

    def slots(federation: object, size: str, count: int) -> list[object]:
        if size == "resnet14":
            raise torch.cuda.OutOfMemoryError("2 GB")
        return [None] * count

    monkeypatch.setattr(step_profile, "empty_kernels", lambda count, streams: 1.0)
    monkeypatch.setattr(step_profile, "make_slots", slots)
    monkeypatch.setattr(step_profile, "milliseconds_per_step", lambda slots: 2.0)
    monkeypatch.setattr(step_profile, "kernels_of_a_step", no_profile)
    monkeypatch.setattr(step_profile, "Federation", lambda config, dataset: None)
    monkeypatch.setattr(step_profile, "synthetic_dataset", lambda name: None)
    output = tmp_path / "steps.json"
    flags = (
        "--output",
        str(output),
        "--precision",
        "fp32",
        "--sizes",
        "resnet10,resnet14,resnet18",
    )
    run_main(step_profile, monkeypatch, *flags)
    sizes = json.loads(output.read_text())["sizes"]
    assert sizes["resnet10"]["ms_per_step"]["4"] == sizes["resnet18"]["ms_per_step"]["4"] == 2
    assert "saw no kernels" in sizes["resnet10"]["error"]
    assert "OutOfMemory" in sizes["resnet14"]["error"]
