"""The metrics log, and what its lines come to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from motley.core.errors import MotleyError
from motley.evaluate import Score, Summary
from motley.runs.metrics import MetricsLog, outcome, to_line
from motley.server.record import RoundRecord


def make_record(number: int, **values: Any) -> RoundRecord:
    """Return a record of two sizes with every field filled."""
    filled: dict[str, Any] = {
        "scores": {"small": Score(0.25, 2.5, (0.5, 0.0)), "large": Score(0.75, 1.25, (1.0, 0.5))},
        "train_loss": 1.5,
        "clients": [2, 5],
        "seconds": {"train": 1.25, "merge": 0.5},
        "bytes_down": 100,
        "bytes_up": 90,
    }
    return RoundRecord(number, **{**filled, **values})


def test_a_line_holds_all_that_is_known_of_a_round() -> None:
    record = make_record(
        3,
        refused={5: "'fc.bias' is missing."},
        idle=[4],
        metrics={"inco/layer1.1/theta": 0.5, "inco/layer1.1/beta": -2.0, "method/in_loss": 0.123456789},
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
        "metrics": {"inco/layer1.1/theta": 0.5, "inco/layer1.1/beta": -2.0, "method/in_loss": 0.123457},
    }


def test_a_round_that_was_not_evaluated_has_no_accuracy() -> None:
    line = to_line(make_record(3, scores={}))
    assert not line.keys() & {"accuracy", "loss", "class_accuracy"}
    assert line["train_loss"] == 1.5


def test_numbers_are_not_rounded_away() -> None:
    line = to_line(make_record(1, scores={"s": Score(1 / 3, 1.23456789e-7, (2 / 3,))}, train_loss=123456789.0))
    assert line["accuracy"]["s"] == pytest.approx(1 / 3, abs=1e-6)
    assert line["loss"]["s"] == pytest.approx(1.23456789e-7, rel=1e-5)
    assert line["train_loss"] == pytest.approx(123456789.0, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_becomes_null(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(
        make_record(1, train_loss=value, scores={"s": Score(0.5, value, (0.5,))}, inco={"layer": {"theta": value}})
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(log.path.read_text(), parse_constant=refuse)
    assert (line["train_loss"], line["loss"]["s"], line["inco"]["layer"]["theta"]) == (None, None, None)


def test_a_line_a_round(tmp_path: Path) -> None:
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
def test_cut_drops_later_rounds(tmp_path: Path, after: int) -> None:
    log = _filled(tmp_path, 6)
    before = log.path.read_text().splitlines(keepends=True)
    log.cut(after)
    assert log.path.read_text() == "".join(before[:after])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_cut_where_there_is_nothing_yet(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.cut(0)
    log.append(make_record(1))
    assert [line["round"] for line in log.read()] == [1]


def test_an_interrupted_cut_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _filled(tmp_path, 3)
    before = log.path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.cut(1)
    assert log.path.read_bytes() == before


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    log = _filled(tmp_path, 3)
    whole = log.path.read_bytes()
    third = whole.rindex(b"\n", 0, -1) + 1
    for end in range(third, len(whole) - 1):
        log.path.write_bytes(whole[:end])
        assert [line["round"] for line in log.read()] == [1, 2]
    log.cut(3)
    assert log.path.read_bytes() == whole[:third]
    log.append(make_record(3))
    assert log.path.read_bytes() == whole


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    log = _filled(tmp_path, 3)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-1])
    log.cut(3)
    assert log.path.read_bytes() == whole


@pytest.mark.parametrize("broken", [b"", b"{", b'{"round": 2, "acc', b"\xff\xfe"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: bytes) -> None:
    log = _filled(tmp_path, 3)
    lines = log.path.read_bytes().split(b"\n")
    log.path.write_bytes(b"\n".join([lines[0], broken, lines[2], b""]))
    before = log.path.read_bytes()
    with pytest.raises(MotleyError, match=r"metrics\.jsonl, line 2"):
        log.cut(3)
    assert log.path.read_bytes() == before


# ---- outcomes


def _line(number: int, small: float, large: float, **values: Any) -> dict[str, Any]:
    accuracy = {"small": small, "large": large, "mean": (small + large) / 2}
    return {"round": number, "accuracy": accuracy, "seconds": {}, "bytes": {"down": 0, "up": 0}, **values}


def test_last_best_and_mean_of_last_k() -> None:
    lines = [_line(1, 0.5, 0.1), _line(2, 0.7, 0.3), _line(3, 0.7, 0.9), _line(4, 0.3, 0.5)]
    found = outcome(lines, last_k=3, targets=())
    assert found.rounds == 4
    assert list(found.accuracy) == ["small", "large", "mean"]
    assert found.accuracy["small"] == Summary(0.3, 0.7, 2, pytest.approx((0.7 + 0.7 + 0.3) / 3))
    assert found.accuracy["large"] == Summary(0.5, 0.9, 3, pytest.approx((0.3 + 0.9 + 0.5) / 3))
    assert found.accuracy["mean"] == Summary(0.4, 0.8, 3, pytest.approx((0.5 + 0.8 + 0.4) / 3))


@pytest.mark.parametrize(("last_k", "mean"), [(1, 0.4), (2, 0.3), (4, 0.25), (9, 0.25)])
def test_mean_is_over_k_evaluations_or_as_many_as_there_are(last_k: int, mean: float) -> None:
    lines = [_line(number, value, value) for number, value in enumerate((0.1, 0.3, 0.2, 0.4), start=1)]
    assert outcome(lines, last_k, ()).accuracy["mean"].mean_of_last_k == pytest.approx(mean)


def test_rounds_to_a_target_are_of_the_mean_and_of_the_first_time() -> None:
    lines = [_line(1, 0.9, 0.1), _line(2, 0.6, 0.6), _line(3, 0.5, 0.5), _line(4, 0.8, 0.7)]
    found = outcome(lines, 2, targets=(0.5, 0.6, 0.7, 0.9))
    assert found.rounds_to == {0.5: 1, 0.6: 2, 0.7: 4, 0.9: None}


def test_totals_are_over_all_rounds_evaluated_or_not() -> None:
    lines: list[dict[str, Any]] = [
        {"round": 1, "seconds": {"train": 1.0}, "bytes": {"down": 10, "up": 7}},
        _line(2, 0.2, 0.4, seconds={"train": 2.0, "evaluate": 0.5}, bytes={"down": 20, "up": 8}),
        {"round": 3, "seconds": {"train": 4.0, "collect": 0.25}, "bytes": {"down": 30, "up": 9}},
    ]
    found = outcome(lines, 5, (0.3,))
    assert (found.rounds, outcome(lines[1:], 5, ()).rounds) == (3, 3)
    assert (found.bytes_down, found.bytes_up) == (60, 24)
    assert found.seconds == {"train": 7.0, "evaluate": 0.5, "collect": 0.25}
    assert found.accuracy["mean"].best_round == 2
    assert found.rounds_to == {0.3: 2}


def test_evaluation_every_k_rounds_counts_rounds_not_evaluations() -> None:
    lines: list[dict[str, Any]] = []
    for number in range(1, 10):
        line = _line(number, number / 10, number / 10)
        if number % 3:
            del line["accuracy"]
        lines.append(line)
    found = outcome(lines, last_k=2, targets=(0.55,))
    assert found.accuracy["mean"] == Summary(0.9, 0.9, 9, pytest.approx((0.6 + 0.9) / 2))
    assert found.rounds_to == {0.55: 6}


@pytest.mark.parametrize("lines", [[], [{"round": 1, "seconds": {}, "bytes": {"down": 1, "up": 1}}]], ids=["no", "one"])
def test_before_the_first_evaluation(lines: list[dict[str, Any]]) -> None:
    found = outcome(lines, 5, (0.5,))
    assert found.accuracy == {}
    assert found.rounds_to == {0.5: None}
    assert found.rounds == len(lines)
