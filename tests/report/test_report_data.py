"""Grouping of runs into series and panels, and the tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.report.report_data import gather
from motley.report.tables import costs, environments, final
from motley.studies.declaration import load_study
from motley.studies.results import collect, save
from motley.studies.runner import StudyWatcher, run_study, unfinished_runs
from motley.studies.sweep import plan_cells
from tests.report.conftest import small_run
from tests.studies.conftest import SWEEP


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


def test_labels_contain_the_settings_that_differ(runs: list[Path], tmp_path: Path) -> None:
    other = small_run(tmp_path / "other", "training.batch_size=8")
    labels = gather([runs[0], other]).labels
    assert labels == ["fedavg, training.batch_size = 16", "fedavg, training.batch_size = 8"]


def test_a_study_has_its_columns_as_panels(study: Path) -> None:
    data = gather([study])
    (panel,) = data.panels.values()
    assert set(panel.series) == {"HeteroAvg", "InCoAvg"}
    assert len(data.runs) == 4
    assert data.studies[0]["missing"]


def test_other_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="neither a run"):
        gather([tmp_path])


def test_tables(runs: list[Path]) -> None:
    (panel,) = gather(runs).panels.values()
    rows = final(panel)
    assert rows[0] == ["", "seeds", "mean of last k", "last", "best", "mlp1", "mlp2", "mlp3"]
    assert "±" in rows[1][2]
    assert rows[2][1] == "1 seed" and "±" not in rows[2][2]
    assert costs(panel)[0][1].startswith("rounds to ")
    assert [row[2] for row in environments(list(panel.series.values()))[1:]] == ["1", "2", "1"]


def test_two_runs_of_one_seed_count_as_one_seed(runs: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(runs[0], again)
    (panel,) = gather([runs[0], again]).panels.values()
    (series,) = panel.series.values()
    assert series.count == "1 seed, 2 runs"
    row = final(panel)[1]
    assert row[1] == "1 seed, 2 runs"
    assert not any("±" in cell for cell in row)
    assert "one, again are 2 runs with the same settings and seed (1)" in series.repeats[0]
    assert all(len(values) == 1 for values in series.curve("mean")[1])


def test_a_repeated_seed_has_no_more_weight(runs: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(runs[0], again)
    (once,) = gather(runs[:2]).panels.values()
    (twice,) = gather([*runs[:2], again]).panels.values()
    assert final(twice)[1][1] == "2 seeds, 3 runs"
    assert final(twice)[1][2:] == final(once)[1][2:]


def test_the_same_folder_given_twice_is_one_run(runs: list[Path]) -> None:
    (panel,) = gather([runs[0], runs[0]]).panels.values()
    assert [series.count for series in panel.series.values()] == ["1 seed"]


def test_two_studies_with_the_same_columns_have_separate_panels(study: Path) -> None:
    other = study.parent / "mine-copy"
    shutil.copytree(study, other, dirs_exist_ok=True)
    data = gather([study, other])
    assert len(data.panels) == 2
    for panel in data.panels.values():
        assert all(series.count == "2 seeds" for series in panel.series.values())


def test_runs_that_differ_in_many_settings_are_labelled_by_folder(
    runs: list[Path], tmp_path: Path
) -> None:
    other = small_run(
        tmp_path / "wider", "training.batch_size=8", "model.mlp.hidden=32", "server.lr=0.5"
    )
    data = gather([runs[0], other])
    assert data.labels == ["one", "wider"]
    table = {row[0]: row[1:] for row in data.differences}
    assert table["training.batch_size"] == ["16", "8"]
    assert table["model.mlp.hidden"] == ["64", "32"]
    assert "data.name" not in table


def test_runs_on_transformed_data_are_not_in_the_same_series(
    runs: list[Path], tmp_path: Path
) -> None:
    other = small_run(
        tmp_path / "larger", "method.name=HeteroAvg", "seed=2", "data.transform.resize=10"
    )
    labels = gather([runs[0], other]).labels
    assert labels == ["fedavg, data.transform.resize = 8", "fedavg, data.transform.resize = 10"]


@pytest.mark.parametrize("text", ["{", "", "[1]", "null"])
def test_a_damaged_environment_is_reported_in_the_table(
    runs: list[Path], tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    (folder / "environment.json").write_text(text)
    (panel,) = gather([folder]).panels.values()
    assert "environment.json cannot be read" in environments(list(panel.series.values()))[1][-1]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": 3}'])
def test_a_damaged_study_is_rejected_by_name(study: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(MotleyError, match=r"study\.json"):
        gather([tmp_path])


def test_a_series_about_one_size_shows_that_size(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        SWEEP.replace('name = "InCoAvg"\nagainst', 'name = "its largest"\nsize = "mlp3"\nagainst')
    )
    file.write_text(
        file.read_text().replace('against = "HeteroAvg"', 'set.method.name = "HeteroAvg"')
    )
    cells = plan_cells(load_study(str(file)), "full", seeds=1)
    run_study(unfinished_runs(cells, tmp_path), tmp_path, StudyWatcher())
    folder = save(load_study(str(file)), "full", cells, collect(cells, tmp_path), tmp_path)
    (panel,) = gather([folder]).panels.values()
    assert len({run.path.resolve() for run in panel.runs()}) == 1
    assert list(panel.distinct) == ["HeteroAvg"]
    rows = final(panel)
    assert rows[2][2] == rows[1][rows[0].index("mlp3")] == rows[2][rows[0].index("mlp3")]
    assert panel.series["its largest"].curve("mean") == panel.series["HeteroAvg"].curve("mlp3")
