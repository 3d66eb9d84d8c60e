"""Planning a study: layers, scales, missing lines, and runs shared between cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.config import parse_overrides
from motley.core.errors import MotleyError
from motley.studies.declaration import load_study
from motley.studies.results import collect, columns, missing
from motley.studies.sweep import Cell, missing_in_motley, plan_cells


def cells(sweep: Path, scale: str = "full", **options: Any) -> list[Cell]:
    return plan_cells(load_study(str(sweep)), scale, **options)


@pytest.mark.parametrize(
    ("scale", "rounds", "seeds"), [("quick", 10, 1), ("half", 50, 3), ("full", 100, 3)]
)
def test_scales_shorten_rounds_and_seeds(scale: str, rounds: int, seeds: int) -> None:
    (cell,) = plan_cells(
        load_study("inco-table2"),
        scale,
        data=["digits"],
        cases=["alpha 0.5"],
        methods=["HeteroAvg"],
    )
    assert cell.runs[0].config.training.rounds == rounds
    assert len(cell.runs) == seeds


def test_selected_cases() -> None:
    study = load_study("inco-table2")
    planned = plan_cells(study, "quick", data=["digits"], cases=["alpha 1.0"])
    assert {cell.case for cell in planned} == {"alpha 1.0"} and len(planned) == len(study.methods)
    assert {run.config.data.partition.alpha for cell in planned for run in cell.runs} == {1.0}  # type: ignore[union-attr]
    with pytest.raises(MotleyError, match="--case alpha 2: unknown name 'alpha 2'"):
        plan_cells(study, "quick", cases=["alpha 2"])


@pytest.mark.parametrize("key", ["optional", "asked"])
def test_an_optional_data_set_runs_only_if_it_is_named(sweep: Path, key: str) -> None:
    """`asked` is the old name of the key."""
    data = f'[[data]]\nname = "digits"\n[[data]]\nname = "mine"\npath = "a.npz"\n{key} = true\n'
    with_data(sweep, data)
    assert {cell.data for cell in cells(sweep)} == {"digits"}
    assert {cell.data for cell in cells(sweep, data=["mine"])} == {"mine"}


def test_overridden_rounds_are_not_scaled(sweep: Path) -> None:
    overrides = parse_overrides(["training.rounds=7"])
    assert cells(sweep, "quick", overrides=overrides)[0].runs[0].config.training.rounds == 7


def test_missing_methods_and_data_are_both_named(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(tmp_path))
    with_data(sweep, '[[data]]\nname = "cifar10"\n')
    said = missing(cells(sweep))
    named = [name for names in said.values() for name in names]
    assert {"FedIN", "cifar10"} <= set(named)
    assert any("MOTLEY_DATA" in reason for reason in said)


def test_what_motley_lacks_is_named_without_opening_data(sweep: Path) -> None:
    data = '[[data]]\nname = "cifar10"\n[[data]]\nname = "unknown"\n'
    with_data(sweep, data, top='needs."model.weights" = "pretrained weights"')
    absent = missing_in_motley(load_study(str(sweep)))
    assert [part.name for part in absent] == ["FedIN", "unknown", "model.weights"]


def test_settings_that_only_the_user_can_provide_are_named(shared_data: Path) -> None:
    overrides = parse_overrides([f"data.root={shared_data}"])
    study = load_study("inco-table2-vit")
    planned = plan_cells(study, "quick", data=["fashion-mnist"], overrides=overrides)
    assert not any(cell.runs for cell in planned)
    assert any("--set model.weights=FILE" in reason for reason in missing(planned))


def test_an_invalid_setting_is_reported_with_its_line(sweep: Path) -> None:
    sweep.write_text(sweep.read_text().replace('against = "HeteroAvg"', "set.method.mu = 1.0"))
    (reason,) = [reason for reason, names in missing(cells(sweep)).items() if names == ["InCoAvg"]]
    assert "method.mu = 1.0: has no effect with method.name = 'fedavg'" in reason


def test_cells_that_need_the_same_run_share_it(sweep: Path) -> None:
    keys = [run.key for cell in cells(sweep) for run in cell.runs]
    assert len(set(keys)) == len(keys) == 4
    # Only the user's own code adds to a key.
    assert [run.key_of_settings for cell in cells(sweep) for run in cell.runs] == keys
    quick = [run.key for cell in cells(sweep, "quick") for run in cell.runs]
    assert set(quick) <= set(keys)  # no scale has fewer than three rounds
    immaterial = ["run.checkpoint_every=1", "data.root=elsewhere", "engine.device=cpu"]
    same = cells(sweep, overrides=parse_overrides(immaterial))
    assert [run.key for cell in same for run in cell.runs] == keys
    for change in (
        "training.batch_size=4",
        "data.partition.name=iid",
        "server.inco.granularity=tensor",
    ):
        other = cells(sweep, overrides=parse_overrides([change]))
        assert not set(keys) & {run.key for cell in other for run in cell.runs}


def test_unknown_names_are_rejected(sweep: Path) -> None:
    with pytest.raises(MotleyError, match="unknown scale 'huge'"):
        cells(sweep, "huge")
    with pytest.raises(MotleyError, match="--data cifar: unknown name 'cifar'"):
        cells(sweep, data=["cifar"])
    with pytest.raises(MotleyError, match="Did you mean 'InCoAvg'"):
        cells(sweep, methods=["InCoAvgg"])


def with_data(sweep: Path, data: str, top: str = "") -> Path:
    """Return the study with another table of data sets, and two data files beside it."""
    text = (
        sweep.read_text().replace('[[data]]\nname = "digits"\n', data).replace("paper.digits", "#")
    )
    sweep.write_text(text.replace("seeds =", f"{top}\nseeds ="))
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    for name in ("a.npz", "b.npz"):
        np.savez(sweep.parent / name, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return sweep


@pytest.mark.parametrize(
    ("top", "data"),
    [
        ('set.data.path = "a.npz"', '[[data]]\nname = "npz"\n'),
        ("", '[[data]]\nname = "npz"\nset.data.path = "a.npz"\n'),
        ("", '[[data]]\nname = "npz"\npath = "a.npz"\n'),
        ("", '[[data]]\nname = "mine"\npath = "a.npz"\n'),
        ("", '[[data]]\nname = "mine"\nset.data.path = "a.npz"\n'),
        ('set.data.path = "b.npz"', '[[data]]\nname = "npz"\npath = "a.npz"\n'),
    ],
)
def test_a_study_can_name_a_data_file(sweep: Path, top: str, data: str) -> None:
    planned = cells(with_data(sweep, data, top))
    assert all(run.config.data.name == "npz" for cell in planned for run in cell.runs)
    assert {run.config.data.path for cell in planned for run in cell.runs} == {
        str(sweep.parent / "a.npz")
    }
    assert planned[0].runs


def test_a_study_can_name_a_table(sweep: Path) -> None:
    rows = "".join(f"{i},{'ab'[i % 2]},{i % 4}\n" for i in range(40))
    (sweep.parent / "mine.csv").write_text("x,outcome,person\n" + rows)
    data = (
        '[[data]]\nname = "my table"\npath = "mine.csv"\n'
        'set.data.files = {target = "outcome", client = "person"}\n'
        'set.model.sizes = ["table1"]\n'
    )
    planned = cells(with_data(sweep, data), methods=["HeteroAvg"])
    data_settings = planned[0].runs[0].config.data
    assert (data_settings.name, Path(data_settings.path).name) == ("files", "mine.csv")
    assert data_settings.files is not None and data_settings.files.client == "person"
    sweep.write_text(sweep.read_text().replace('target = "outcome"', 'target = "outcom"'))
    assert "Did you mean 'outcome'?" in str(cells(sweep, methods=["HeteroAvg"])[0].missing)


def test_several_files_and_named_data_sets_in_one_study(sweep: Path) -> None:
    tables = ('name = "A"\npath = "a.npz"\n', 'name = "B"\npath = "b.npz"\n', 'name = "digits"\n')
    data = "".join(f"[[data]]\n{table}" for table in tables)
    planned = cells(with_data(sweep, data, 'set.data.path = "a.npz"'), methods=["HeteroAvg"])
    assert [cell.column for cell in planned] == ["A, alpha 1", "B, alpha 1", "digits, alpha 1"]
    assert [Path(cell.runs[0].config.data.path).name for cell in planned] == ["a.npz", "b.npz", ""]


def test_the_advice_on_missing_data_depends_on_the_reader(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(sweep.parent / "empty"))
    data = (
        '[[data]]\nname = "npz"\n[[data]]\nname = "C"\npath = "c.npz"\n[[data]]\nname = "cifar10"\n'
    )
    said = {names[0]: reason for reason, names in missing(cells(with_data(sweep, data))).items()}
    assert "[[data]] path" in said["npz"] and "MOTLEY_DATA" not in said["npz"]
    assert "c.npz" in said["C"] and "MOTLEY_DATA" not in said["C"]
    assert "set MOTLEY_DATA" in said["cifar10"]


def test_a_line_can_show_one_size(sweep: Path) -> None:
    sweep.write_text(sweep.read_text().replace('against = "HeteroAvg"', 'size = "mlp3"'))
    cell = cells(sweep)[1]
    assert cell.size == "mlp3" and cell.runs
    sweep.write_text(sweep.read_text().replace('size = "mlp3"', 'size = "mlp4"'))
    assert any("unknown size 'mlp4'" in reason for reason in missing(cells(sweep)))


def test_another_measure_keeps_only_papers_numbers_of_its_kind(sweep: Path) -> None:
    """A paper's accuracy is compared with the best and the last accuracy, and nothing else."""
    clients = {"evaluation": {"per_client": "all", "client_test_fraction": 0.2}}
    sweep.write_text(sweep.read_text() + "\n[targets]\ndigits = [60]\n")

    def papers(score: str) -> list[float | None]:
        planned = cells(sweep, methods=["HeteroAvg"], score=score, overrides=clients)
        return [cell.paper.mean if cell.paper else None for cell in planned]

    assert papers("") == papers("last") == papers("best") == [50.0]
    assert papers("client-mean") == papers("rounds-to") == [None]


def test_a_target_is_in_the_titles_of_rounds_only(sweep: Path) -> None:
    sweep.write_text(sweep.read_text() + "\n[targets]\ndigits = [60]\n")

    def titles(score: str) -> list[str]:
        planned = cells(sweep, score=score)
        return [title for title, _ in columns(collect(planned, sweep.parent / "no runs"))]

    assert titles("last") == ["digits, alpha 1 (last, %)"]
    assert titles("rounds-to") == ["digits, alpha 1 (rounds-to to 60 %, rounds)"]
