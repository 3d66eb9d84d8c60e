"""What is read from a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from motley.studies.measures import Measure
from tests.conftest import tiny_config

LINES: list[dict[str, Any]] = [
    {
        "round": number,
        "accuracy": {"resnet10": accuracy, "mean": accuracy},
        "seconds": {},
        "bytes": {"down": 0, "up": 0},
        "inco": {"a.weight": {"positive": share}},
    }
    for number, accuracy, share in ((1, 0.2, 0.5), (2, 0.6, 0.7), (3, 0.4, 0.9))
]


@pytest.mark.parametrize(
    ("name", "target", "number"),
    [
        ("last", None, 40.0),
        ("best", None, 60.0),
        ("mean-of-last-k", None, 50.0),
        ("rounds-to", 50.0, 2),
        ("rounds-to", 61.0, None),
        ("positive:a.weight", None, 70.0),
        ("positive:b.weight", None, None),
    ],
)
def test_measures(name: str, target: float | None, number: float | None) -> None:
    found = Measure.checked(name).of(LINES, tiny_config("evaluation.last_k=2"), target)
    assert found == (pytest.approx(number) if number is not None else None)


def test_units() -> None:
    assert Measure("rounds-to").unit == "rounds"
    assert Measure("best").unit == "%"
