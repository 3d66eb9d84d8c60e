"""The numbers of the report's tables, from metrics by hand."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from motley.report.report_data import Panel, Run
from motley.report.tables import clients, costs, targets
from tests.conftest import tiny_config


def line(number: int, accuracy: float, **fields: Any) -> dict[str, Any]:
    """Return the metrics of a round that took two seconds."""
    return {
        "round": number,
        "accuracy": {"mlp1": accuracy, "mean": accuracy},
        "seconds": {"train": 1.5, "evaluate": 0.5},
        "bytes": {"down": 4_000_000, "up": 2_000_000},
        **fields,
    }


def scored(mean: float, **by_size: float) -> dict[str, Any]:
    """Return the scores of clients whose mean is given, and that of sizes."""
    numbers = {"clients": 4, "weighted": mean, "worst_tenth": mean, "std": 0.0}
    sizes = {size: {**numbers, "mean": value} for size, value in by_size.items()}
    return {"mean": mean, **numbers, "unscored": 0, "sizes": sizes}


def panel_of(*runs: tuple[int, list[dict[str, Any]]]) -> Panel:
    """Return a panel with one series of runs, each with its seed and its metrics."""
    panel = Panel("digits")
    for number, (seed, lines) in enumerate(runs):
        run = Run(Path(f"run-{number}"), tiny_config(f"seed={seed}"), lines, {})
        panel.add("fedavg", run)
    return panel


def test_scores_of_clients_are_over_distinct_seeds() -> None:
    """Seed 1 was run twice, with 0.5 and 0.7: it counts once, with 0.6."""
    by_run = ((1, 0.5), (1, 0.7), (2, 0.9))
    runs = [(seed, [line(1, 0.3, client_scores=scored(mean, mlp1=mean))]) for seed, mean in by_run]
    _, row = clients(panel_of(*runs))
    means = [60.0, 90.0]
    assert row[:3] == ["fedavg", "4", "30.0 ± 0.0"]
    assert row[3] == f"{fmean(means):.1f} ± {stdev(means):.1f}"


def test_sizes_that_only_some_seeds_scored_are_shown() -> None:
    first = [line(1, 0.3, client_scores=scored(0.5, mlp1=0.5))]
    second = [line(1, 0.3, client_scores=scored(0.6, mlp1=0.6, mlp2=0.8))]
    _, whole, one, two = clients(panel_of((1, first), (2, second)))
    assert (whole[0], one[0], two[0]) == ("fedavg", "fedavg, mlp1", "fedavg, mlp2")
    assert two[3] == "80.0"


def test_seconds_per_round_of_runs_of_different_lengths() -> None:
    long = [line(number, 0.3) for number in range(1, 11)]
    panel = panel_of((1, long), (2, long[:2]))
    assert costs(panel)[1][-4:] == ["24.0", "12.0", "12.0", "2.00"]


@pytest.mark.parametrize("percent", [28, 29, 57, 58])
def test_a_whole_percent_that_all_runs_reached_is_the_target(percent: int) -> None:
    """0.29 / 0.01 is 28.999999999999996."""
    panel = panel_of((1, [line(1, percent / 100)]))
    assert targets(panel) == (percent / 100,)
    assert costs(panel)[0][1] == f"rounds to {percent}%"
    assert costs(panel)[1][1] == "1"
