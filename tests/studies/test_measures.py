"""The measures of a study, computed from a run's metrics."""

from __future__ import annotations

from typing import Any

import pytest

from motley.studies.measures import Measure, whole_model
from tests.conftest import tiny_config

LINES: list[dict[str, Any]] = [
    {
        "round": number,
        "accuracy": {"resnet10": accuracy, "mean": accuracy},
        "seconds": {},
        "bytes": {"down": 0, "up": 0},
        "metrics": {"inco/a.weight/positive": share},
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
    value = Measure.checked(name).of(LINES, tiny_config("evaluation.last_k=2"), target)
    assert value == (pytest.approx(number) if number is not None else None)


@pytest.mark.parametrize(("name", "number"), [("last", 30.0), ("rounds-to", 2)])
def test_the_whole_model_instead_of_the_mean_of_all_sizes(name: str, number: float) -> None:
    lines = [
        {**line, "accuracy": {"resnet10-w1": line["accuracy"]["mean"] - 0.1, "mean": 0.9}}
        for line in LINES
    ]
    config = tiny_config("split.name=width", "split.rates=[0.5,1]", "model.sizes=['resnet10']")
    assert Measure(name).of(lines, config, 50.0, whole=True) == pytest.approx(number)
    assert Measure(name).of(lines, config, 50.0) == (90.0 if name == "last" else 1)


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (("split.name=width", "split.rates=[0.5,1]", "model.sizes=['mlp2']"), "mlp2-w1"),
        (("split.name=width", "split.rates=[0.5]", "model.sizes=['mlp2']"), None),
        (
            (
                "split.name=grid",
                "split.cuts=[2,4]",
                "split.rates=[1,1]",
                "model.sizes=['resnet10']",
            ),
            "resnet10-e2",
        ),
        (("model.sizes=['mlp1','mlp2']",), None),
        (("model.sizes=['mlp2']",), "mlp2"),
    ],
)
def test_which_size_is_the_whole_model(overrides: tuple[str, ...], size: str | None) -> None:
    assert whole_model(tiny_config(*overrides)) == size


def test_units() -> None:
    assert Measure("rounds-to").unit == "rounds"
    assert Measure("best").unit == "%"


def test_the_accuracy_of_one_size() -> None:
    lines = [{**line, "accuracy": {"mlp1": 0.25, "mlp2": 0.75, "mean": 0.5}} for line in LINES]
    assert Measure("last").of(lines, tiny_config(), None, size="mlp2") == 75.0


@pytest.mark.parametrize("percent", [28, 29, 57, 57.3, 58])
def test_a_target_that_is_reached_exactly(percent: float) -> None:
    """100 * 0.57 is 56.99999999999999."""
    accuracy = round(percent / 100, 6)
    lines = [{**LINES[0], "accuracy": {"mlp1": accuracy, "mean": accuracy}}]
    assert Measure("rounds-to").of(lines, tiny_config(), percent) == 1
    assert Measure("rounds-to").of(lines, tiny_config(), percent + 0.1) is None


def test_scores_of_the_clients_that_have_the_whole_model() -> None:
    scores = {"mean": 0.5, "sizes": {"mlp2-w0.5": {"mean": 0.4}, "mlp2-w1": {"mean": 0.8}}}
    lines = [{**line, "client_scores": scores} for line in LINES]
    config = tiny_config("split.name=width", "split.rates=[0.5,1]", "model.sizes=['mlp2']")
    assert Measure("client-mean").of(lines, config, None) == pytest.approx(50.0)
    whole = Measure("client-mean").of(lines, config, None, whole=True)
    assert whole == pytest.approx(80.0)
    half = Measure("client-mean").of(lines, config, None, size="mlp2-w0.5")
    assert half == pytest.approx(40.0)
    no_whole_model = tiny_config("model.sizes=['mlp1','mlp2']")
    assert Measure("client-mean").of(lines, no_whole_model, None, whole=True) is None
