"""`motley show` prints the numbers of the metrics and rejects folders that are not runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command, TinyRun
from tests.conftest import tiny_config

SIZES = ["resnet10", "resnet14", "resnet18"]


def table(text: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by its first column."""
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[1:] for row in rows}


def percent(value: float) -> str:
    """Return a fraction as the table shows it."""
    return f"{100 * value:.2f}%"


def line(number: int, accuracy: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """Return a line of metrics."""
    values: dict[str, Any] = {"round": number, "train_loss": 1.0, "clients": [0]}
    if accuracy is not None:
        values["accuracy"] = accuracy
    return {
        **values,
        "seconds": {"train": 1.0, "merge": 0.25},
        "bytes": {"down": 2_000_000, "up": 500_000},
        **more,
    }


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    """Return a function that writes a run's folder with given metrics."""

    def write(lines: list[dict[str, Any]], *overrides: str, end: str = "") -> Path:
        folder = tmp_path / "made up"
        folder.mkdir()
        (folder / "config.toml").write_text(tiny_config(*overrides).to_toml())
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(values) + "\n" for values in lines) + end
        )
        return folder

    return write


def test_the_numbers_are_those_of_the_metrics(motley: Command, tiny_run: TinyRun) -> None:
    answer = motley("show", tiny_run.path)
    lines = [
        json.loads(text) for text in (tiny_run.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert (answer.code, answer.err, len(lines)) == (0, "", 3)
    shown = table(answer.out)
    assert list(shown) == [*SIZES, "mean"]
    for name, cells in shown.items():
        series = [values["accuracy"][name] for values in lines]
        best = 1 + series.index(max(series))
        assert cells == [
            percent(series[2]),
            percent(max(series)),
            str(best),
            percent((series[1] + series[2]) / 2),
        ]
    for values in lines:
        assert values["accuracy"]["mean"] == pytest.approx(
            sum(values["accuracy"][s] for s in SIZES) / 3, abs=1e-6
        )
    down, up = (sum(values["bytes"][way] for values in lines) / 1e6 for way in ("down", "up"))
    assert f"communication: {down:.1f} MB down, {up:.1f} MB up" in answer.out
    seconds = sum(sum(values["seconds"].values()) for values in lines)
    found = re.search(r"time: ([\d.]+) s, ([\d.]+) s per round", answer.out)
    assert found and float(found[1]) == pytest.approx(seconds, abs=0.06)
    assert float(found[2]) == pytest.approx(seconds / 3, abs=0.006)
    assert "1.0% mean accuracy: first reached in round 1" in answer.out
    assert "100.0% mean accuracy: not reached" in answer.out
    assert "round 3 of 3" in answer.out
    assert answer.out.startswith(
        "digits, fedavg + InCo (official) (preset quickstart, split depth, seed 1)\n"
    )


def test_last_best_and_mean_are_over_the_evaluated_rounds(motley: Command, run_of: Any) -> None:
    lines = [
        line(1, {"resnet10": 0.25, "mean": 0.25}),
        line(2),
        line(3, {"resnet10": 0.75, "mean": 0.75}),
        line(4, {"resnet10": 0.75, "mean": 0.75}),
        line(5, {"resnet10": 0.5, "mean": 0.5}, seconds={"train": 3.0, "collect": 0.5}),
    ]
    run = run_of(lines, "evaluation.last_k=3", "evaluation.targets=[0.6]", "training.rounds=50")
    answer = motley("show", run)
    assert table(answer.out)["resnet10"] == ["50.00%", "75.00%", "3", "66.67%"]
    assert "mean of last 3" in answer.out
    assert "round 5 of 50" in answer.out
    assert "60.0% mean accuracy: first reached in round 3" in answer.out
    assert "communication: 10.0 MB down, 2.5 MB up" in answer.out
    assert "time: 8.5 s, 1.70 s per round (train 7.0 s, merge 1.0 s, collect 0.5 s)" in answer.out


def test_what_the_method_reports_of_itself_is_shown_as_it_was_last(
    motley: Command, run_of: Any
) -> None:
    lines = [
        line(1, method={"pool": 4.0}),
        line(2, method={"in_loss": 0.0123456, "pool": 6.0, "odd": None}),
    ]
    answer = motley("show", run_of(lines, "method.name=fedin"))
    assert "fedin, last round: in_loss 0.01235, pool 6, odd not finite\n" in answer.out


def test_a_line_that_a_kill_cut_short_does_not_count(motley: Command, run_of: Any) -> None:
    run = run_of([line(1, {"resnet10": 0.25, "mean": 0.25})], end='{"round": 2, "accu')
    answer = motley("show", run)
    assert answer.code == 0 and "round 1 of 3" in answer.out


def test_metrics_that_are_broken_in_the_middle_are_named(motley: Command, run_of: Any) -> None:
    run = run_of([line(1)], end="broken\n" + json.dumps(line(2)) + "\n")
    answer = motley("show", run)
    assert (answer.code, answer.out) == (2, "")
    assert "metrics.jsonl, line 2: these are not the metrics of a round: not JSON" in answer.err


def test_a_run_without_a_finished_round_says_so(motley: Command, run_of: Any) -> None:
    run = run_of([])
    assert motley("show", run) == (0, f"{run} has no finished round yet.\n", "")
    (run / "metrics.jsonl").unlink()
    assert motley("show", run) == (0, f"{run} has no finished round yet.\n", "")
    answer = motley("show", run, "--fingerprint")
    assert answer == (2, "", f"motley: {run} has no checkpoint yet.\n")


def test_a_run_without_an_evaluated_round_says_so(motley: Command, run_of: Any) -> None:
    answer = motley(
        "show", run_of([line(1), line(2)], "evaluation.every=3", "evaluation.targets=[0.5]")
    )
    assert answer.code == 0
    assert "no round has been evaluated yet" in answer.out and "round 2 of 3" in answer.out
    assert "50.0% mean accuracy: not reached" in answer.out and not table(answer.out)


def test_a_folder_that_is_no_run_is_refused(motley: Command, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none", tmp_path / "[bold]"):
        for option in ((), ("--fingerprint",)):
            answer = motley("show", folder, *option)
            assert answer == (
                2,
                "",
                f"motley: {folder} is not a run: there is no config.toml in it.\n",
            )


def test_a_run_whose_configuration_is_broken_is_refused(motley: Command, run_of: Any) -> None:
    run = run_of([line(1)])
    (run / "config.toml").write_text("[[[")
    answer = motley("show", run)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"motley: {run / 'config.toml'}: is not valid TOML: ")


def test_a_fingerprint_is_64_hexadecimal_digits_and_nothing_else(
    motley: Command, tiny_run: TinyRun
) -> None:
    first, again = (motley("show", tiny_run.path, "--fingerprint") for _ in range(2))
    assert (first.code, first.err) == (0, "")
    assert re.fullmatch(r"[0-9a-f]{64}\n", first.out)
    assert again == first


def test_a_fingerprint_is_that_of_the_newest_state(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    assert motley("show", copy, "--fingerprint") == motley("show", tiny_run.path, "--fingerprint")
    shutil.rmtree(copy / "checkpoints" / "round-000003")
    older = motley("show", copy, "--fingerprint")
    assert re.fullmatch(r"[0-9a-f]{64}\n", older.out)
    assert older.out != motley("show", tiny_run.path, "--fingerprint").out


def test_showing_changes_nothing(motley: Command, tiny_run: TinyRun) -> None:
    def snapshot() -> dict[Path, tuple[int, int]]:
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_size)
            for path in tiny_run.path.rglob("*")
        }

    before = snapshot()
    motley("show", tiny_run.path)
    motley("show", tiny_run.path, "--fingerprint")
    assert snapshot() == before


# --- several runs, and JSON


def test_several_runs_are_shown_side_by_side(
    motley: Command, tiny_run: TinyRun, run_of: Any
) -> None:
    other = run_of(
        [line(1, {"resnet10": 0.25, "vgg9": 0.75, "mean": 0.5})], "training.rounds=50", "seed=7"
    )
    answer = motley("show", tiny_run.path, other)
    assert (answer.code, answer.err) == (0, "")
    rows = table(answer.out)
    lines = [
        json.loads(text) for text in (tiny_run.path / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        rows["data"] == ["digits", "digits"]
        and rows["inco"] == ["official", ""]
        and rows["seed"] == ["1", "7"]
    )
    assert rows["round"] == ["3 of 3", "1 of 50"]
    assert rows["last accuracy, resnet10"] == [percent(lines[2]["accuracy"]["resnet10"]), "25.00%"]
    assert (
        rows["last accuracy, vgg9"] == ["", "75.00%"] and rows["best accuracy, mean"][1] == "50.00%"
    )
    assert rows["MB down"][1] == "2.0" and rows["seconds"][1] == "1.2"


def test_json_has_one_object_per_run(motley: Command, tiny_run: TinyRun, run_of: Any) -> None:
    (one,) = json.loads(motley("show", tiny_run.path, "--json").out)
    lines = [
        json.loads(text) for text in (tiny_run.path / "metrics.jsonl").read_text().splitlines()
    ]
    mean = [values["accuracy"]["mean"] for values in lines]
    assert (one["run"], one["data"], one["method"], one["inco"]) == (
        str(tiny_run.path),
        "digits",
        "fedavg",
        "official",
    )
    assert (one["round"], one["rounds"], one["finished"]) == (3, 3, True)
    assert one["accuracy"]["mean"] == {
        "last": mean[2],
        "best": max(mean),
        "best_round": 1 + mean.index(max(mean)),
        "mean_of_last": pytest.approx((mean[1] + mean[2]) / 2),
    }
    assert one["rounds_to"] == {"0.01": 1, "1.0": None}
    assert one["fingerprint"] + "\n" == motley("show", tiny_run.path, "--fingerprint").out
    empty = run_of([])
    first, second = json.loads(motley("show", tiny_run.path, empty, "--json").out)
    assert first == one
    assert (second["round"], second["finished"], second["accuracy"], second["fingerprint"]) == (
        0,
        False,
        {},
        None,
    )


def test_fingerprints_of_several_runs_are_named(motley: Command, tiny_run: TinyRun) -> None:
    (mark,) = motley("show", tiny_run.path, "--fingerprint").out.splitlines()
    assert (
        motley("show", tiny_run.path, tiny_run.path, "--fingerprint").out
        == 2 * f"{mark}  {tiny_run.path}\n"
    )


def test_the_mean_of_the_last_rounds_says_how_many_there_are(motley: Command, run_of: Any) -> None:
    lines = [line(number, {"resnet10": 0.5, "mean": 0.5}) for number in (1, 2, 3)]
    assert "mean of last 3" in motley("show", run_of(lines, "evaluation.last_k=5")).out
