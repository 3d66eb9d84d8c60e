"""From a study to its runs: every cell's configurations, or why it cannot run here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from motley.config import Config, Table, resolve
from motley.data import DATASETS, load_dataset
from motley.data.dataset import data_root
from motley.data.settings import DataSettings
from motley.errors import MotleyError, unknown
from motley.methods import METHODS
from motley.methods.names import NAMES
from motley.studies.declaration import Case, DataColumn, MethodRow, Number, Study
from motley.studies.measures import Measure, whole_model


@dataclass(frozen=True)
class Scale:
    """How much of a study is run."""

    rounds: float
    """Share of the rounds."""
    seeds: int
    """At most so many seeds; 0: all."""
    summary: str


SCALES = {
    "quick": Scale(0.1, 1, "a tenth of the rounds, one seed"),
    "half": Scale(0.5, 0, "half of the rounds, all seeds"),
    "full": Scale(1.0, 0, "the paper's rounds and seeds"),
}
FEWEST_ROUNDS = 3
STAND_IN = "cifar10"
"""In whose place a data set without a reader is put, to see whether all else could run."""
_BESIDE: Any = {
    "run": True,
    "preset": True,
    "data": {"root"},
    "engine": {"device", "slots", "memory_gib", "memory_share"},
}
"""Settings that do not make a run another run."""


@dataclass(frozen=True)
class Planned:
    """A run that a cell asks for."""

    seed: int
    config: Config

    @property
    def key(self) -> str:
        """The run's folder: two cells, or two studies, that ask for the same run share it.

        What a run keeps, where data lie and what it runs on do not enter. All else does, defaults too: two partitions
        that are at their defaults are not the same.
        """
        values = self.config.model_dump(mode="json", exclude=_BESIDE)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        inco = "-inco" if self.config.method.inco.active else ""
        return f"{self.config.data.name}-{self.config.method.name}{inco}-seed{self.seed}-{digest}"


class Lack(NamedTuple):
    """What is missing, by the name the table has for it, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Cell:
    """One method in one case of one data set."""

    method: str
    data: str
    case: str
    measure: Measure
    against: str
    paper: Number | None
    target: float | None
    whole: bool = False
    """Whether its numbers are those of the whole model."""
    runs: tuple[Planned, ...] = field(default=())
    missing: tuple[Lack, ...] = ()
    """Why it cannot run here; empty where it can."""

    @property
    def column(self) -> str:
        """The title of its column."""
        return ", ".join(part for part in (self.data, self.case) if part)


def plan(
    study: Study,
    scale: str,
    *,
    data: Iterable[str] = (),
    cases: Iterable[str] = (),
    methods: Iterable[str] = (),
    seeds: int = 0,
    overrides: Table | None = None,
) -> list[Cell]:
    """Return the cells of a study, column by column; `data`, `cases` and `methods` leave out the others."""
    if scale not in SCALES:
        raise MotleyError(f"--scale: {unknown('scale', scale, SCALES)}")
    columns = _chosen("--data", study.data, list(data), [column for column in study.data if not column.asked])
    numbers = [study.cases.index(case) for case in _chosen("--case", study.cases, list(cases), list(study.cases))]
    rows = _chosen("--method", study.methods, list(methods), list(study.methods))
    most = seeds or SCALES[scale].seeds or len(study.seeds)
    chosen = study.seeds[:most]
    return [
        _cell(study, SCALES[scale].rounds, chosen, row, column, number, overrides or {})
        for column in columns
        for number in numbers
        for row in rows
    ]


def _chosen(option: str, declared: Iterable[Any], asked: list[str], default: list[Any]) -> list[Any]:
    by_name = {item.name: item for item in declared}
    for name in asked:
        if name not in by_name:
            raise MotleyError(f"{option} {name}: {unknown('name', name, by_name)}")
    return [by_name[name] for name in asked] or default


def _cell(
    study: Study,
    share: float,
    seeds: Iterable[int],
    row: MethodRow,
    column: DataColumn,
    number: int,
    overrides: Table,
) -> Cell:
    case = study.cases[number]
    paper, targets = row.paper.get(column.name), study.targets.get(column.name)
    runs: tuple[Planned, ...] = ()
    missing = [*_missing_method(row)]
    if not missing:
        try:
            runs = tuple(_planned(study, share, seed, row, column, case, overrides) for seed in seeds)
            missing += _missing_needs(study, column, runs[0].config)
            if row.whole and not whole_model(runs[0].config):
                missing.append(Lack(row.name, "no size is the whole model."))
        except MotleyError as error:
            missing.append(Lack(row.name, str(error).splitlines()[0]))
    missing += _missing_data(column.name, overrides)
    return Cell(
        row.name,
        column.name,
        case.name,
        case.measure or study.measure,
        row.against,
        paper[number] if paper else None,
        targets[number] if targets else None,
        row.whole,
        () if missing else runs,
        tuple(missing),
    )


def _planned(
    study: Study, share: float, seed: int, row: MethodRow, column: DataColumn, case: Case, overrides: Table
) -> Planned:
    base = [] if column.preset else [study.set]
    special = [e.set for e in study.exceptions if e.matches(row.name, column.name, case.name)]
    own = {"seed": seed, "run": {"keep": 1, "tensorboard": False}}
    readable = {} if column.name in DATASETS else {"data": {"name": STAND_IN}}
    layers = [*base, {**column.layer, **readable}, case.set, row.layer, *special, own]
    preset = column.preset or study.preset
    rounds = resolve(preset, layers).training.rounds
    fewer = {"training": {"rounds": min(rounds, max(FEWEST_ROUNDS, round(share * rounds)))}}
    return Planned(seed, resolve(preset, [*layers, fewer, overrides]))


def _missing_method(row: MethodRow) -> Iterator[Lack]:
    name = row.layer["method"]["name"]
    if row.missing:
        yield Lack(row.name, row.missing)
    elif name not in METHODS and name not in NAMES:
        yield Lack(row.name, f"there is no method {name!r} (motley list methods).")


def _missing_data(name: str, overrides: Table) -> Iterator[Lack]:
    given = DataSettings.model_construct(**{"root": "", "path": "", **overrides.get("data", {})})
    if name not in DATASETS:
        yield Lack(name, "there is no reader for this data set (motley list datasets).")
    elif reason := _unreadable(name, given.root_path or data_root(), given.file_path):
        yield Lack(name, reason)


@cache
def _unreadable(name: str, root: Path, path: Path | None) -> str:
    """Return why a data set cannot be loaded, or nothing: its files are looked at once."""
    try:
        load_dataset(name, root=root, path=path)
    except MotleyError as error:
        return f"{str(error).splitlines()[0]} Set MOTLEY_DATA to the folder that holds it."
    return ""


def _missing_needs(study: Study, column: DataColumn, config: Config) -> Iterator[Lack]:
    if column.preset:
        return
    values = config.model_dump()
    for key, what in study.needs.items():
        value: Any = values
        for step in key.split("."):
            value = value[step]
        if not value:
            yield Lack(study.name, f"needs {what}: --set {key}=FILE.")
