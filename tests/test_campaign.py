"""The campaign's queue runs what is not finished and keeps it as compact files; pages are drawn from these files."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motley.core.errors import MotleyError
from motley.runs.checkpoint import last_round
from motley.runs.folder import RunFolder
from motley.studies.declaration import DataColumn, MethodRow, Study
from tests.conftest import tiny_config
from tests.data.natural_files import write_writers

ROOT = Path(__file__).resolve().parents[1]


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "campaign" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pages_agree_with_the_results() -> None:
    done = call("pages.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_queue_runs_and_is_not_run_again(tmp_path: Path) -> None:
    queue = tmp_path / "queue.txt"
    queue.write_text(
        "# a comment\n\n"
        'inco-table2 --data digits --case "alpha 0.5" --method InCoAvg --seed 1 --set training.rounds=10\n'
        "inco-table2 --data digits --case 'alpha 0.5' --method InCoAvg --seed 1 --set training.rounds=10\n"
    )
    options = [
        "--work",
        str(tmp_path / "work"),
        "--results",
        str(tmp_path / "results"),
        "--jobs",
        "1",
    ]
    first = call("run.py", str(queue), *options)
    assert "1 runs, 1 of them to do" in first.stdout, first.stdout + first.stderr
    (file,) = (tmp_path / "results").rglob("*.json")
    assert file.relative_to(tmp_path / "results") == Path(
        "inco-table2/digits/alpha-0.5/InCoAvg/seed-1.json"
    )
    result = json.loads(file.read_text())
    assert result["rounds"] == list(range(1, 11))
    assert len(result["train_loss"]) == 10
    layers = result["inco"]["10"]
    assert all({"theta", "beta"} <= set(coefficients) for coefficients in layers.values())
    assert set(result["accuracy"]) == {"mlp1", "mlp2", "mlp3", "mean"}
    assert "1 runs, 0 of them to do" in call("run.py", str(queue), *options).stdout


def test_a_queue_is_listed_without_a_folder_for_runs(tmp_path: Path) -> None:
    queue = str(write_queue(tmp_path, 2))
    listed = call("run.py", queue, "--results", str(tmp_path), "--list")
    expected = tmp_path / "inco-table2/digits/alpha-0.5/HeteroAvg/seed-1.json"
    assert listed.stdout.split() == [str(expected)], listed.stderr
    assert "--work is needed" in call("run.py", queue).stderr


def write_queue(folder: Path, rounds: int) -> Path:
    """Write a queue of one run, and return its path."""
    queue = folder / "queue.txt"
    queue.write_text(
        "inco-table2 --data digits --case 'alpha 0.5' --method HeteroAvg --seed 1 "
        f"--set training.rounds={rounds}\n"
    )
    return queue


def result_of(folder: Path) -> dict[str, object]:
    (file,) = (folder / "results").rglob("seed-1.json")
    values: dict[str, object] = json.loads(file.read_text())
    return values


def test_a_run_that_was_cut_off_continues(tmp_path: Path) -> None:
    rounds = 60
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        write_queue(folder, rounds)

    def options(folder: Path) -> list[str]:
        return [
            str(folder / "queue.txt"),
            "--work",
            str(folder / "work"),
            "--results",
            str(folder / "results"),
        ]

    call("run.py", *options(whole), "--here")
    command = [sys.executable, str(ROOT / "campaign" / "run.py"), *options(cut), "--here"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        metrics = cut / "work" / "inco-table2-digits-alpha-0.5-HeteroAvg-seed1" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline, "no round has ended"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert metrics.read_text().count("\n") < rounds
    continued = call("run.py", *options(cut))
    assert "continued" in continued.stdout, continued.stdout + continued.stderr
    ours, expected = result_of(cut), result_of(whole)
    assert ours["seconds"] is None
    for key in ("rounds", "accuracy", "train_loss"):
        assert ours[key] == expected[key]


NAME = "inco-table2-digits-alpha-0.5-HeteroAvg-seed1"


def options_of(folder: Path) -> list[str]:
    work, results = folder / "work", folder / "results"
    return [str(folder / "queue.txt"), "--work", str(work), "--results", str(results)]


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runs_save_a_checkpoint_and_end_when_the_queue_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Runs that went on alone would take the GPU from the next stretch, which could not continue them."""
    write_queue(tmp_path, 2000)
    command = [sys.executable, str(ROOT / "campaign" / "run.py"), *options_of(tmp_path)]
    folder = RunFolder(tmp_path / "work" / NAME)
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until(lambda: folder.metrics.exists() and folder.metrics.read_text().count("\n") > 2)
        process.send_signal(number)
    wait_until(lambda: not folder.is_locked())
    rounds = folder.metrics.read_text().count("\n")
    # A round whose callbacks were interrupted may have its line already, and is run again.
    assert last_round(folder.checkpoints) in (rounds - 1, rounds)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "work" / NAME).mkdir(parents=True)
    (tmp_path / "work" / NAME / "mine.txt").write_text("in the way")
    queue = write_queue(tmp_path, 3)
    queue.write_text(queue.read_text().replace("HeteroAvg", "HeteroAvg --method InCoAvg"))
    done = call("run.py", *options_of(tmp_path))
    assert f"{NAME} failed: " in done.stdout and "is not empty" in done.stdout, done.stderr
    assert f"1 runs failed: {NAME}" in done.stdout
    assert done.returncode == 1
    (result,) = (tmp_path / "results").rglob("*.json")
    assert result.parent.name == "InCoAvg"


def test_a_run_that_fails_in_this_process_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = campaign_script(monkeypatch)
    write_queue(tmp_path, 2)
    (task,) = script.read_queue(tmp_path / "queue.txt", tmp_path)
    tasks = [replace(task, study=study) for study in "abc"]
    begun: list[str] = []

    def start(config: object, path: Path) -> None:
        begun.append(path.name[0])
        if begun == ["a"]:
            raise MotleyError("no memory")
        if begun == ["a", "b"]:
            raise ValueError("a bug")

    monkeypatch.setattr(script, "start_run", start)
    monkeypatch.setattr(script, "keep", lambda *_: None)
    failed = script.run_here(tasks, tmp_path, 60.0)
    assert begun == ["a", "b", "c"]
    assert failed == tasks[:2]
    said = capsys.readouterr().out
    assert "failed: no memory" in said and "ValueError: a bug" in said


def test_a_folder_that_is_taken_is_noticed_before_any_run(tmp_path: Path) -> None:
    queue = write_queue(tmp_path, 2)
    queue.write_text(queue.read_text().replace("HeteroAvg", "InCoAvg") + queue.read_text())
    RunFolder.create(tmp_path / "work" / NAME, tiny_config())
    done = call("run.py", *options_of(tmp_path))
    assert done.returncode == 1 and "other settings than the queue asks for" in done.stderr
    assert not list((tmp_path / "work").glob("*InCoAvg*"))


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    write_queue(tmp_path, 2)
    file = tmp_path / "results/inco-table2/digits/alpha-0.5/HeteroAvg/seed-1.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"study":"inco-tab')
    done = call("run.py", *options_of(tmp_path))
    assert done.returncode == 1
    assert f"{file} is damaged. Remove it to run it again." in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the size of files")
def test_a_result_is_written_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    script = campaign_script(monkeypatch)
    result = {"accuracy": {"mean": [0.5] * 1000}}
    monkeypatch.setattr(script, "compact", lambda *_: result)
    task = NamedTask("a", tmp_path / "seed-1.json")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises((OSError, MotleyError)):
            script.keep(task, None, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    script.keep(task, None, 1.0)
    assert json.loads(task.result.read_text()) == result


@dataclass(frozen=True)
class NamedTask:
    """A task that cannot be run."""

    name: str
    result: Path
    is_done: bool = False

    def folder(self, work: Path) -> None:
        return None


def campaign_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "campaign")
    return importlib.import_module("run")


@pytest.mark.parametrize(
    ("seconds", "expected", "started"),
    [
        ([100.0, 100.0, 100.0], 180.0, ["a", "b"]),  # the first one shows how long they take
        ([None, 100.0, 100.0], 290.0, ["a"]),  # a continued one shows nothing
        ([100.0, 100.0, 100.0], 310.0, []),
        ([10.0, 270.0, 1.0], 1.0, ["a", "b"]),
    ],
)
def test_no_run_is_started_that_would_not_finish_in_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float | None],
    expected: float,
    started: list[str],
) -> None:
    """With 299 seconds. A continued run takes 10 of them."""
    script = campaign_script(monkeypatch)
    now = [0.0]
    names: list[str] = []
    whole = dict(zip("abc", seconds, strict=True))

    class Finished:
        """A run that has ended as soon as it is started."""

        has_ended = True

        def __init__(self, task: NamedTask, work: Path) -> None:
            self.task = task
            names.append(task.name)
            now[0] += whole[task.name] or 10.0

        def finish(self) -> float | None:
            return whole[self.task.name]

    monkeypatch.setattr(script, "Process", Finished)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=abs))
    tasks = [NamedTask(name, tmp_path / name) for name in "abc"]
    assert script.run_queue(tasks, tmp_path, 1, 299.0, expected) == []
    assert names == started


def test_results_of_another_length_are_not_taken_for_done(tmp_path: Path) -> None:
    options = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "--here"]
    call("run.py", str(write_queue(tmp_path, 2)), *options)
    again = call("run.py", str(write_queue(tmp_path, 3)), *options)
    assert again.returncode == 1
    assert "is of 2 rounds, and the queue asks for 3" in again.stderr


def test_a_folder_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    options = ["--work", str(tmp_path / "work"), "--here"]
    call("run.py", str(write_queue(tmp_path, 2)), *options, "--results", str(tmp_path / "short"))
    queue = write_queue(tmp_path, 3)
    again = call("run.py", str(queue), *options, "--results", str(tmp_path / "long"))
    assert again.returncode == 1
    assert "has a run with other settings than the queue asks for" in again.stderr


def test_only_runs_at_the_papers_communication_are_compared_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the ceiling, runs of other lengths, or those that also have public images."""
    monkeypatch.syspath_prepend(ROOT / "campaign")
    pages = importlib.import_module("pages")
    for file in (ROOT / "results" / "beyond").rglob("seed-*.json"):
        config = json.loads(file.read_text())["config"]
        assert pages.is_recipe(config)
        for table, key, value in (
            ("training", "rounds", 1000),
            ("federation", "clients", 1),
            ("public", "name", "cifar100"),
        ):
            assert not pages.is_recipe({**config, table: {**config[table], key: value}})


def test_a_whole_model_is_scored_by_its_own_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "campaign")
    pages = importlib.import_module("pages")
    (file,) = (ROOT / "results" / "natural-har").rglob("HeteroFL*/seed-1.json")
    run = json.loads(file.read_text())
    runs = {"HeteroFL": {1: run}}
    widest = next(iter(run["accuracy"]))
    assert pages.shown_size(MethodRow(name="HeteroFL", whole=True), runs) == widest
    assert pages.shown_size(MethodRow(name="HeteroFL"), runs) == "mean"


def test_a_whole_model_is_compared_with_the_number_of_the_other_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in `motley study`. The other line has no size of that name."""
    monkeypatch.syspath_prepend(ROOT / "campaign")
    pages = importlib.import_module("pages")
    lines = (MethodRow(name="HeteroFL", whole=True, against="FedAvg"), MethodRow(name="FedAvg"))
    study = Study(name="a study", methods=lines, data=(DataColumn(name="har"),))
    runs = {}
    for name, pattern in (("HeteroFL", "HeteroFL*"), ("FedAvg", "FedAvg-layers-shared")):
        (file,) = (ROOT / "results" / "natural-har").rglob(f"{pattern}/seed-1.json")
        runs[name] = {1: json.loads(file.read_text())}
    widest = next(iter(runs["HeteroFL"][1]["accuracy"]))
    ours = pages.window_mean(runs["HeteroFL"][1], widest)
    theirs = pages.window_mean(runs["FedAvg"][1], "mean")
    assert (
        pages.paired_difference(study, runs, lines[0])
        == f"{ours - theirs:+.1f} (one seed) vs FedAvg"
    )


def test_unseen_writers_are_scored_by_runs_that_repeat_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = campaign_script(monkeypatch)
    unseen = importlib.import_module("unseen")
    write_writers(tmp_path)
    settings = (
        f"data.root={tmp_path}",
        "data.transform.resize=14",
        "model.sizes=['mlp1','mlp2']",
        "federation.clients=4",
        "federation.clients_per_round=2",
        "training.rounds=5",
    )
    options = " ".join(f'--set "{setting}"' for setting in settings)
    queue = tmp_path / "queue.txt"
    line = f'--method "FedAvg, layers shared" --seed 1 {options}'
    queue.write_text(f"{ROOT}/campaign/natural-writers.toml {line}\n")
    (task,) = script.read_queue(queue, tmp_path / "results")
    assert script.run_here([task], tmp_path / "first", 60.0) == []

    folder = unseen.repeat(task, tmp_path / "again")
    result = json.loads(task.result.read_text())
    scores = unseen.unseen_scores(folder.path)
    assert set(scores) == {"mlp1", "mlp2"}
    for size, score in scores.items():
        # Both writers have as many digits, so the mean is the accuracy that the run reports.
        assert score["clients"] == 2
        assert score["mean"] == pytest.approx(result["accuracy"][size][-1], abs=1e-4)
        assert score["worst_tenth"] <= score["mean"]

    result["accuracy"]["mlp1"][0] += 0.0001
    task.result.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="has other accuracies than"):
        unseen.repeat(task, tmp_path / "again")
