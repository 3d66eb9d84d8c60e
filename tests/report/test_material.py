"""Which runs make a series, and which series a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.errors import MotleyError
from motley.report.material import gather
from motley.report.tables import costs, environments, final
from tests.report.conftest import small_run


def test_seeds_of_one_method_are_one_series(runs: list[Path]) -> None:
    (panel,) = gather(runs).panels.values()
    assert panel.title == "digits, dirichlet 0.5"
    assert {label: len(series.runs) for label, series in panel.series.items()} == {
        "fedavg": 2,
        "fedavg + InCo (official)": 1,
    }
    assert panel.sizes == ["mean", "mlp1", "mlp2", "mlp3"]
    rounds, values = panel.series["fedavg"].curve("mean")
    assert rounds == [1, 2, 3]
    assert all(len(row) == 2 for row in values)


def test_runs_that_differ_otherwise_say_in_what(runs: list[Path], tmp_path: Path) -> None:
    other = small_run(tmp_path / "other", "training.batch_size=8")
    labels = gather([runs[0], other]).labels
    assert labels == ["fedavg, training.batch_size = 16", "fedavg, training.batch_size = 8"]


def test_a_study_brings_its_columns(study: Path) -> None:
    material = gather([study])
    (panel,) = material.panels.values()
    assert set(panel.series) == {"HeteroAvg", "InCoAvg"}
    assert len(material.runs) == 4
    assert material.studies[0]["missing"]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="neither a run"):
        gather([tmp_path])


def test_tables(runs: list[Path]) -> None:
    (panel,) = gather(runs).panels.values()
    rows = final(panel)
    assert rows[0] == ["", "seeds", "last", "best", "mean of last k", "mlp1", "mlp2", "mlp3"]
    assert "±" in rows[1][2]
    assert "one seed" in rows[2][2]
    assert costs(panel)[0][1].startswith("rounds to ")
    assert [row[1] for row in environments(list(panel.series.values()))[1:]] == ["1", "2", "1"]
