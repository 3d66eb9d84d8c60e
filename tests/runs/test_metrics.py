"""The metrics log and its summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from motley.core.errors import MotleyError
from motley.evaluate import Score, Summary
from motley.runs.metrics import MetricsLog, layer_metrics, outcome, stage_metrics, to_line
from motley.server.record import RoundRecord


def make_record(number: int, **values: Any) -> RoundRecord:
    """Return a record with scores of two sizes; `values` replaces and adds fields."""
    defaults: dict[str, Any] = {
        "scores": {"small": Score(0.25, 2.5, (0.5, 0.0)), "large": Score(0.75, 1.25, (1.0, 0.5))},
        "train_loss": 1.5,
        "clients": [2, 5],
        "seconds": {"train": 1.25, "merge": 0.5},
        "bytes_down": 100,
        "bytes_up": 90,
    }
    return RoundRecord(number, **{**defaults, **values})


def test_a_line_contains_all_fields_of_a_record() -> None:
    record = make_record(
        3,
        refused={5: "'fc.bias' is missing."},
        idle=[4],
        metrics={
            "inco/layer1.1/theta": 0.5,
            "inco/layer1.1/beta": -2.0,
            "method/in_loss": 0.123456789,
        },
    )
    assert to_line(record) == {
        "round": 3,
        "accuracy": {"small": 0.25, "large": 0.75, "mean": 0.5},
        "loss": {"small": 2.5, "large": 1.25},
        "class_accuracy": {"small": [0.5, 0.0], "large": [1.0, 0.5]},
        "train_loss": 1.5,
        "clients": [2, 5],
        "refused": {"5": "'fc.bias' is missing."},
        "idle": [4],
        "seconds": {"train": 1.25, "merge": 0.5},
        "bytes": {"down": 100, "up": 90},
        "metrics": {
            "inco/layer1.1/theta": 0.5,
            "inco/layer1.1/beta": -2.0,
            "method/in_loss": 0.123457,
        },
    }


def test_lines_of_earlier_versions_are_read_into_the_metrics(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    line = {"round": 1, "seconds": {}, "bytes": {"down": 1, "up": 1}}
    old = {"method": {"pool": 4.0}, "inco": {"small/layer1.weight": {"theta": 0.5, "beta": None}}}
    log.path.write_text(json.dumps({**line, **old}) + "\n")
    (read,) = log.read()
    metrics = {
        "method/pool": 4.0,
        "inco/small/layer1.weight/theta": 0.5,
        "inco/small/layer1.weight/beta": None,
    }
    assert read == {**line, "metrics": metrics}
    assert stage_metrics(read) == {"pool": 4.0}
    assert layer_metrics(read, "inco") == {"small/layer1.weight": {"theta": 0.5, "beta": None}}
    assert layer_metrics(read, "method") == {} and layer_metrics(
        line, "inco"
    ) == {} == stage_metrics(line)


def test_a_round_that_was_not_evaluated_has_no_accuracy() -> None:
    line = to_line(make_record(3, scores={}))
    assert not line.keys() & {"accuracy", "loss", "class_accuracy"}
    assert line["train_loss"] == 1.5


def test_small_and_large_numbers_keep_six_digits() -> None:
    line = to_line(
        make_record(1, scores={"s": Score(1 / 3, 1.23456789e-7, (2 / 3,))}, train_loss=123456789.0)
    )
    assert line["accuracy"]["s"] == pytest.approx(1 / 3, abs=1e-6)
    assert line["loss"]["s"] == pytest.approx(1.23456789e-7, rel=1e-5)
    assert line["train_loss"] == pytest.approx(123456789.0, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_null(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(
        make_record(
            1,
            train_loss=value,
            scores={"s": Score(0.5, value, (0.5,))},
            metrics={"inco/a/theta": value},
        )
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(log.path.read_text(), parse_constant=refuse)
    assert (line["train_loss"], line["loss"]["s"], line["metrics"]["inco/a/theta"]) == (
        None,
        None,
        None,
    )


def test_one_line_per_round(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    records = [make_record(number, train_loss=number / 8) for number in (1, 2, 3)]
    for count, record in enumerate(records, start=1):
        log.append(record)
        assert log.path.read_text().count("\n") == count
    assert log.read() == [to_line(record) for record in records]


# ---- after a crash


def _filled(path: Path, rounds: int) -> MetricsLog:
    log = MetricsLog(path / "metrics.jsonl")
    for number in range(1, rounds + 1):
        log.append(make_record(number))
    return log


@pytest.mark.parametrize("after", [0, 1, 4, 6, 9])
def test_truncate_deletes_later_rounds(tmp_path: Path, after: int) -> None:
    log = _filled(tmp_path, 6)
    before = log.path.read_text().splitlines(keepends=True)
    log.truncate(after)
    assert log.path.read_text() == "".join(before[:after])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_without_a_log(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.truncate(0)
    log.append(make_record(1))
    assert [line["round"] for line in log.read()] == [1]


def test_an_interrupted_truncation_leaves_the_log_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _filled(tmp_path, 3)
    before = log.path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.truncate(1)
    assert log.path.read_bytes() == before


def test_an_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    log = _filled(tmp_path, 3)
    complete = log.path.read_bytes()
    third = complete.rindex(b"\n", 0, -1) + 1
    for end in range(third, len(complete) - 1):
        log.path.write_bytes(complete[:end])
        assert [line["round"] for line in log.read()] == [1, 2]
    log.truncate(3)
    assert log.path.read_bytes() == complete[:third]
    log.append(make_record(3))
    assert log.path.read_bytes() == complete


def test_a_last_line_that_lacks_only_its_newline_is_complete(tmp_path: Path) -> None:
    log = _filled(tmp_path, 3)
    complete = log.path.read_bytes()
    log.path.write_bytes(complete[:-1])
    log.truncate(3)
    assert log.path.read_bytes() == complete


@pytest.mark.parametrize("broken", [b"", b"{", b'{"round": 2, "acc', b"\xff\xfe"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, broken: bytes) -> None:
    log = _filled(tmp_path, 3)
    lines = log.path.read_bytes().split(b"\n")
    log.path.write_bytes(b"\n".join([lines[0], broken, lines[2], b""]))
    before = log.path.read_bytes()
    with pytest.raises(MotleyError, match=r"metrics\.jsonl, line 2"):
        log.truncate(3)
    assert log.path.read_bytes() == before


# ---- summaries


def _line(number: int, small: float, large: float, **values: Any) -> dict[str, Any]:
    accuracy = {"small": small, "large": large, "mean": (small + large) / 2}
    return {
        "round": number,
        "accuracy": accuracy,
        "seconds": {},
        "bytes": {"down": 0, "up": 0},
        **values,
    }


def test_last_best_and_mean_of_last_k() -> None:
    lines = [_line(1, 0.5, 0.1), _line(2, 0.7, 0.3), _line(3, 0.7, 0.9), _line(4, 0.3, 0.5)]
    summary = outcome(lines, last_k=3, targets=())
    assert summary.rounds == 4
    assert list(summary.accuracy) == ["small", "large", "mean"]
    assert summary.accuracy["small"] == Summary(0.3, 0.7, 2, pytest.approx((0.7 + 0.7 + 0.3) / 3))
    assert summary.accuracy["large"] == Summary(0.5, 0.9, 3, pytest.approx((0.3 + 0.9 + 0.5) / 3))
    assert summary.accuracy["mean"] == Summary(0.4, 0.8, 3, pytest.approx((0.5 + 0.8 + 0.4) / 3))


@pytest.mark.parametrize(("last_k", "mean"), [(1, 0.4), (2, 0.3), (4, 0.25), (9, 0.25)])
def test_the_mean_is_over_the_last_k_evaluations_or_all_if_fewer(last_k: int, mean: float) -> None:
    lines = [
        _line(number, value, value) for number, value in enumerate((0.1, 0.3, 0.2, 0.4), start=1)
    ]
    assert outcome(lines, last_k, ()).accuracy["mean"].mean_of_last_k == pytest.approx(mean)


def test_rounds_to_target_is_the_first_round_whose_mean_accuracy_reaches_it() -> None:
    lines = [_line(1, 0.9, 0.1), _line(2, 0.6, 0.6), _line(3, 0.5, 0.5), _line(4, 0.8, 0.7)]
    summary = outcome(lines, 2, targets=(0.5, 0.6, 0.7, 0.9))
    assert summary.rounds_to == {0.5: 1, 0.6: 2, 0.7: 4, 0.9: None}


def test_totals_include_rounds_without_evaluation() -> None:
    lines: list[dict[str, Any]] = [
        {"round": 1, "seconds": {"train": 1.0}, "bytes": {"down": 10, "up": 7}},
        _line(2, 0.2, 0.4, seconds={"train": 2.0, "evaluate": 0.5}, bytes={"down": 20, "up": 8}),
        {"round": 3, "seconds": {"train": 4.0, "collect": 0.25}, "bytes": {"down": 30, "up": 9}},
    ]
    summary = outcome(lines, 5, (0.3,))
    assert (summary.rounds, outcome(lines[1:], 5, ()).rounds) == (3, 3)
    assert (summary.bytes_down, summary.bytes_up) == (60, 24)
    assert summary.seconds == {"train": 7.0, "evaluate": 0.5, "collect": 0.25}
    assert summary.accuracy["mean"].best_round == 2
    assert summary.rounds_to == {0.3: 2}


def test_evaluation_every_k_rounds_counts_rounds_not_evaluations() -> None:
    lines: list[dict[str, Any]] = []
    for number in range(1, 10):
        line = _line(number, number / 10, number / 10)
        if number % 3:
            del line["accuracy"]
        lines.append(line)
    summary = outcome(lines, last_k=2, targets=(0.55,))
    assert summary.accuracy["mean"] == Summary(0.9, 0.9, 9, pytest.approx((0.6 + 0.9) / 2))
    assert summary.rounds_to == {0.55: 6}


@pytest.mark.parametrize(
    "lines", [[], [{"round": 1, "seconds": {}, "bytes": {"down": 1, "up": 1}}]], ids=["no", "one"]
)
def test_before_the_first_evaluation(lines: list[dict[str, Any]]) -> None:
    summary = outcome(lines, 5, (0.5,))
    assert summary.accuracy == {}
    assert summary.rounds_to == {0.5: None}
    assert summary.rounds == len(lines)


def test_a_size_that_is_not_in_every_evaluation_is_summarized_over_its_own_rounds() -> None:
    """If clients' own models are evaluated, a size may have no client in a round."""
    lines = []
    for number, accuracy in enumerate(
        [{"a": 0.1, "mean": 0.1}, {"a": 0.3, "b": 0.5, "mean": 0.4}, {"b": 0.2, "mean": 0.2}], 1
    ):
        line = {"round": number, "accuracy": accuracy, "seconds": {}, "bytes": {"down": 0, "up": 0}}
        lines.append(line)
    summaries = outcome(lines, 5, ()).accuracy
    assert list(summaries) == ["a", "b", "mean"]
    assert (summaries["a"].last, summaries["a"].best_round) == (0.3, 2)
    assert (summaries["b"].best, summaries["b"].best_round, summaries["b"].last) == (0.5, 2, 0.2)
