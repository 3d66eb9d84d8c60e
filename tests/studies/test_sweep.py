"""From a study to runs: layers, scales, what is missing, and which runs are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.config import parse_overrides
from motley.errors import MotleyError
from motley.studies.declaration import load_study
from motley.studies.results import missing
from motley.studies.sweep import Cell, plan


def cells(sweep: Path, scale: str = "full", **given: object) -> list[Cell]:
    return plan(load_study(str(sweep)), scale, **given)  # type: ignore[arg-type]


def test_scales_trade_rounds_and_seeds() -> None:
    study = load_study("inco-table2")
    planned = {s: plan(study, s, data=["digits"], methods=["HeteroAvg"])[0].runs for s in ("quick", "half", "full")}
    assert {s: runs[0].config.training.rounds for s, runs in planned.items()} == {"quick": 10, "half": 50, "full": 100}
    assert {s: len(runs) for s, runs in planned.items()} == {"quick": 1, "half": 3, "full": 3}


def test_only_the_cases_asked_for() -> None:
    study = load_study("inco-table2")
    planned = plan(study, "quick", data=["digits"], cases=["alpha 1.0"])
    assert {cell.case for cell in planned} == {"alpha 1.0"} and len(planned) == len(study.methods)
    assert {run.config.data.partition.alpha for cell in planned for run in cell.runs} == {1.0}  # type: ignore[union-attr]
    with pytest.raises(MotleyError, match="--case alpha 2: unknown name 'alpha 2'"):
        plan(study, "quick", cases=["alpha 2"])


def test_the_users_rounds_count_before_the_scale(sweep: Path) -> None:
    overrides = parse_overrides(["training.rounds=7"])
    assert cells(sweep, "quick", overrides=overrides)[0].runs[0].config.training.rounds == 7


def test_missing_methods_and_data_are_both_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(tmp_path))
    said = missing(plan(load_study("fedimpro-table10"), "full"))
    named = [name for names in said.values() for name in names]
    assert {"SphereFed", "CCVR", "cifar10", "cifar100"} <= set(named)
    assert any("MOTLEY_DATA" in reason for reason in said)


def test_what_only_the_user_can_give_is_asked_for(shared_data: Path) -> None:
    overrides = parse_overrides([f"data.root={shared_data}"])
    found = plan(load_study("inco-table2-vit"), "quick", data=["fashion-mnist"], overrides=overrides)
    assert not any(cell.runs for cell in found)
    assert any("--set model.weights=FILE" in reason for reason in missing(found))


def test_a_setting_that_cannot_work_is_told_with_its_line(sweep: Path) -> None:
    sweep.write_text(sweep.read_text().replace('against = "HeteroAvg"', "set.method.mu = 1.0"))
    (reason,) = [reason for reason, names in missing(cells(sweep)).items() if names == ["InCoAvg"]]
    assert "unknown key 'mu'" in reason


def test_cells_that_ask_for_one_run_share_it(sweep: Path) -> None:
    keys = [run.key for cell in cells(sweep) for run in cell.runs]
    assert len(set(keys)) == len(keys) == 4
    quick = [run.key for cell in cells(sweep, "quick") for run in cell.runs]
    assert set(quick) <= set(keys)  # three rounds are the fewest, at any scale
    beside = ["run.checkpoint_every=1", "data.root=elsewhere", "engine.device=cpu"]
    kept = cells(sweep, overrides=parse_overrides(beside))
    assert [run.key for cell in kept for run in cell.runs] == keys
    for change in ("training.batch_size=4", "data.partition.name=iid", "method.inco.granularity=tensor"):
        other = cells(sweep, overrides=parse_overrides([change]))
        assert not set(keys) & {run.key for cell in other for run in cell.runs}


def test_unknown_choices_are_refused(sweep: Path) -> None:
    with pytest.raises(MotleyError, match="unknown scale 'huge'"):
        cells(sweep, "huge")
    with pytest.raises(MotleyError, match="--data cifar: unknown name 'cifar'"):
        cells(sweep, data=["cifar"])
    with pytest.raises(MotleyError, match="Did you mean 'InCoAvg'"):
        cells(sweep, methods=["InCoAvgg"])
