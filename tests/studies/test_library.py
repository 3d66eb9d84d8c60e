"""Every run of every study of the library can be built: its names exist, its settings fit each other.

Data sets are looked past, for most are not here: random images of their shapes stand in. What cannot be built is
listed as missing, and is exactly what is named here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from motley.bench import SHAPES
from motley.config import Config
from motley.data import Dataset
from motley.data.dataset import Examples
from motley.data.partition import Partition
from motley.federation import Federation
from motley.studies import sweep
from motley.studies.declaration import Study, studies
from motley.studies.results import missing
from motley.studies.sweep import plan

LIBRARY = studies()
NOT_BUILT = {"FedGen", "FedET", "CCVR", "FedDF", "SphereFed"}
"""Methods of the papers' tables that there are not."""
OTHERWISE_MISSING = {
    "fedin-table3": {"InclusiveFL": "sizes that share no layer"},
    "fedimpro-table8": {
        row.name: "data.partition.name: unknown partition 'natural'" for row in LIBRARY["fedimpro-table8"].methods
    },
    "inco-table2-vit": {"inco-table2-vit": "needs ImageNet weights"},
}
"""Study -> line -> how the reason begins."""


def columns(study: Study) -> list[str]:
    return [column.name for column in study.data]


def dataset(name: str) -> Dataset:
    """Return a few random images of a data set's shape."""
    height, width, channels = (8, 8, 1) if name == "digits" else SHAPES[name][:3]
    examples = Examples(np.zeros((40, height, width, channels), dtype=np.uint8), np.arange(40) % 10)
    return Dataset(name, examples, examples, 10)


SEEN: set[str] = set()
"""Kinds of configurations that were built already: studies share many."""


def distinct(configs: Iterator[Config]) -> Iterator[Config]:
    """Return configurations that differ in what can be built, each kind once."""
    for config in configs:
        values = config.model_dump(mode="json", include={"model", "split", "method"})
        kind = json.dumps([SHAPES.get(config.data.name), config.federation.size_assignment, values])
        if kind not in SEEN:
            SEEN.add(kind)
            yield config


@pytest.fixture
def data_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look past which data sets are here, and draw no models to evaluate: a fifth of the time is left."""
    monkeypatch.setattr(sweep, "_missing_data", lambda *given: iter(()))
    monkeypatch.setattr("motley.federation.Evaluator", lambda *given: None)


@pytest.mark.usefixtures("data_are_there")
@pytest.mark.parametrize("name", LIBRARY)
def test_every_run_can_be_built(name: str) -> None:
    study = LIBRARY[name]
    cells = plan(study, "full", data=columns(study), seeds=1)
    assert any(cell.runs for cell in cells) or name in OTHERWISE_MISSING
    for config in distinct(run.config for cell in cells for run in cell.runs):
        clients = config.federation.clients
        engine = config.engine.model_copy(update={"device": "cpu"})
        partition = Partition.from_owners(np.arange(40) % clients, clients)
        Federation(config.model_copy(update={"engine": engine}), dataset=dataset(config.data.name), partition=partition)


def flat(table: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield from flat(value, f"{where}{key}.") if isinstance(value, dict) else [(f"{where}{key}", value)]


@pytest.mark.usefixtures("data_are_there")
@pytest.mark.parametrize("name", LIBRARY)
def test_what_case_line_and_exceptions_set_is_what_is_run(name: str) -> None:
    """A preset of a higher layer, for one, undoes what lower ones set one by one."""
    study = LIBRARY[name]
    for cell in plan(study, "full", data=columns(study), seeds=1):
        case = next(case for case in study.cases if case.name == cell.case)
        row = next(row for row in study.methods if row.name == cell.method)
        special = [e.set for e in study.exceptions if e.matches(cell.method, cell.data, cell.case)]
        asked = {key: value for layer in (case.set, row.set, *special) for key, value in flat(layer)}
        for run in cell.runs:
            found = dict(flat(run.config.model_dump(mode="json")))
            wrong = {key: found.get(key) for key, value in asked.items() if found.get(key) != value}
            assert wrong.keys() <= {"method.name"}, (cell.method, cell.column, wrong)


@pytest.mark.usefixtures("data_are_there")
@pytest.mark.parametrize("name", LIBRARY)
def test_what_is_missing_is_listed_with_its_reason(name: str) -> None:
    study = LIBRARY[name]
    told = {who: reason for reason, names in missing(plan(study, "full", data=columns(study))).items() for who in names}
    expected = {row.name: "there is no method" for row in study.methods if row.name in NOT_BUILT}
    expected |= OTHERWISE_MISSING.get(name, {})
    assert told.keys() == expected.keys()
    assert all(told[who].startswith(reason) for who, reason in expected.items())


def test_systems_are_run_with_their_own_splits() -> None:
    """And not, by the method's plain name, over the layers that the other lines share."""
    for name in ("fedin-table1", "fedin-table1-rounds", "inco-splits"):
        cells = plan(LIBRARY[name], "full", data=["digits"], seeds=1)
        splits = {cell.method.removesuffix(" + InCo"): cell.runs[0].config.split.name for cell in cells if cell.runs}
        wanted = {"HeteroFL": "width", "FedRolex": "width", "ScaleFL": "grid", "InclusiveFL": "inclusive"}
        assert {method: splits[method] for method in wanted} == wanted
