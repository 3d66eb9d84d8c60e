"""TensorBoard event files, if tensorboard is installed and `run.tensorboard` is set."""

from __future__ import annotations

import builtins
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from motley.runs.checkpoint import checkpoints
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from tests.conftest import TINY, tiny_config
from tests.runs import crash
from tests.runs.crash import Fate, InterruptAt

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

FAST = (
    "training.batch_size=64",
    "training.epochs=0.5",
    "run.checkpoint_every=2",
    "training.rounds=5",
)


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the series that TensorBoard shows for a run: tag -> list of (step, value)."""
    events = accumulators.EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0}
    )
    events.Reload()
    series = {}
    for tag in events.Tags()["scalars"]:
        series[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return series


def assert_shows_the_metrics(folder: Path) -> None:
    lines = MetricsLog(folder / "metrics.jsonl").read()
    series = shown(folder)
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        expected.setdefault("train/loss", []).append((line["round"], line["train_loss"]))
        expected.setdefault("seconds/round", []).append(
            (line["round"], sum(line["seconds"].values()))
        )
        for group in ("accuracy", "loss", "method"):
            for name, value in line.get(group, {}).items():
                expected.setdefault(f"{group}/{name}", []).append((line["round"], value))
    assert series.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in series[tag]] == [step for step, _ in points], tag
        assert [value for _, value in series[tag]] == pytest.approx(
            [value for _, value in points], abs=1e-3
        ), tag


def test_event_files_hold_every_round(tmp_path: Path) -> None:
    start_run(tiny_config(*FAST), tmp_path / "run")
    assert_shows_the_metrics(tmp_path / "run")
    assert [step for step, _ in shown(tmp_path / "run")["accuracy/mean"]] == [1, 2, 3, 4, 5]


def test_rounds_that_were_not_evaluated_have_no_accuracy(tmp_path: Path) -> None:
    start_run(tiny_config(*FAST, "evaluation.every=2"), tmp_path / "run")
    assert_shows_the_metrics(tmp_path / "run")
    assert [step for step, _ in shown(tmp_path / "run")["accuracy/mean"]] == [2, 4, 5]


def test_after_a_resume_no_step_is_shown_twice(tmp_path: Path) -> None:
    """Round 3 is interrupted after its metrics were written, so it is run and written again."""
    with pytest.raises(KeyboardInterrupt):
        start_run(tiny_config(*FAST), tmp_path / "run", [InterruptAt(3)])
    assert [step for step, _ in shown(tmp_path / "run")["train/loss"]] == [1, 2, 3]
    resume_run(tmp_path / "run")
    files = (tmp_path / "run" / "tensorboard").iterdir()
    # TensorBoard sorts files by name. Two files of the same second could be in the wrong order.
    seconds = {file.name.split(".")[3] for file in files}
    assert len(seconds) == 2
    assert_shows_the_metrics(tmp_path / "run")


@pytest.mark.parametrize(
    "fate",
    [Fate(4, "metrics.jsonl"), Fate(2, "/checkpoints")],
    ids=["long after a save", "right after a save"],
)
def test_a_kill_loses_no_step_that_was_saved(tmp_path: Path, fate: Fate) -> None:
    """Rounds 1 and 2 are in a checkpoint and are not run again."""
    folder = tmp_path / "run"
    overrides = [
        argument
        for override in (*TINY, *FAST, "engine.threads=1")
        for argument in ("--set", override)
    ]
    process = crash.start(crash.motley, folder, ["run", *overrides, "--out", str(folder)], fate)
    assert crash.finish(process) == -signal.SIGKILL
    assert [path.name for path in checkpoints(folder / "checkpoints")] == ["round-000002"]
    resume_run(folder)
    assert_shows_the_metrics(folder)


def test_event_files_can_be_turned_off(tmp_path: Path) -> None:
    start_run(tiny_config(*FAST, "training.rounds=1", "run.tensorboard=false"), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_run_works_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "tensorboard" or name == "torch.utils.tensorboard":
            raise ImportError(f"No module named {name!r}")
        return importing(name, *arguments, **options)

    for name in [name for name in sys.modules if "tensorboard" in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    start_run(tiny_config(*FAST, "training.rounds=1"), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert len(MetricsLog(tmp_path / "run" / "metrics.jsonl").read()) == 1


def test_scores_of_clients_are_shown(tmp_path: Path) -> None:
    settings = (
        "evaluation.per_client=all",
        "evaluation.client_test_fraction=0.2",
        "evaluation.personalize_epochs=1",
        "model.sizes=['mlp1']",
        "training.rounds=2",
    )
    start_run(tiny_config(*settings), tmp_path / "run")
    series = shown(tmp_path / "run")
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    for tag, table in (("clients", ""), ("personalized_clients", "personalized")):
        for name in ("mean", "weighted", "worst_tenth", "std"):
            expected = []
            for line in lines:
                scores = line["client_scores"]
                numbers = scores[table] if table else scores
                expected.append((line["round"], pytest.approx(numbers[name], abs=1e-5)))
            assert series[f"{tag}/{name}"] == expected
