"""From a study to its runs: every cell's configurations, or the reason why it cannot run here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from motley.config import Config, resolve
from motley.config.paper_names import NAMES
from motley.core.errors import MotleyError, unknown
from motley.data import DATASETS, load_dataset
from motley.data.dataset import data_root
from motley.data.settings import DataSettings
from motley.methods import METHODS
from motley.settings import Table
from motley.studies.declaration import FILE_READER, Case, DataColumn, MethodRow, Number, Study
from motley.studies.measures import Measure, whole_model


@dataclass(frozen=True)
class Scale:
    """How much of a study is run."""

    #: Fraction of the rounds.
    rounds: float
    #: At most this many seeds; 0: all.
    seeds: int
    summary: str


SCALES = {
    "quick": Scale(0.1, 1, "a tenth of the rounds, one seed"),
    "half": Scale(0.5, 0, "half of the rounds, all seeds"),
    "full": Scale(1.0, 0, "all rounds, all seeds"),
}
FEWEST_ROUNDS = 3
#: Replaces a data set that has no reader, to find out whether everything else could run.
STAND_IN = "cifar10"
#: Settings that do not affect a run's numbers: two runs that differ in these only are the same run.
IMMATERIAL: Any = {
    "run": True,
    "preset": True,
    "data": {"root"},
    "engine": {"device", "slots", "client_state_host_gib", "client_state_gpu_fraction"},
}


@dataclass(frozen=True)
class Planned:
    """A run that a cell asks for."""

    seed: int
    config: Config

    @property
    def key(self) -> str:
        """The name of the run's folder. Two cells, or two studies, that ask for the same run share it.

        Settings that do not affect the numbers are left out of the digest. All others are in it, defaults too: two
        partitions with default settings are not the same partition.
        """
        values = self.config.model_dump(mode="json", exclude=IMMATERIAL)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        inco = "-inco" if self.config.method.inco.active else ""
        return f"{self.config.data.name}-{self.config.method.name}{inco}-seed{self.seed}-{digest}"


class Lack(NamedTuple):
    """Something that is missing, by its name in the table, and the reason."""

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
    #: Whether its numbers are those of the whole model.
    whole: bool = False
    #: The size whose numbers it shows; empty: the mean over all sizes.
    size: str = ""
    runs: tuple[Planned, ...] = field(default=())
    #: Why it cannot run here; empty if it can.
    missing: tuple[Lack, ...] = ()

    @property
    def which_model(self) -> str:
        """Text behind the method's name if the numbers are not the mean over all sizes."""
        if self.whole:
            return ", whole model"
        return f", {self.size}" if self.size else ""

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
            missing += _missing_size(row, runs[0].config)
        except MotleyError as error:
            missing.append(Lack(row.name, str(error).splitlines()[0]))
    missing += _missing_data(study, column, case, overrides)
    return Cell(
        row.name,
        column.name,
        case.name,
        case.measure or study.measure,
        row.against,
        paper[number] if paper else None,
        targets[number] if targets else None,
        row.whole,
        row.size,
        () if missing else runs,
        tuple(missing),
    )


def _planned(
    study: Study, share: float, seed: int, row: MethodRow, column: DataColumn, case: Case, overrides: Table
) -> Planned:
    special = [e.set for e in study.exceptions if e.matches(row.name, column.name, case.name)]
    own = {"seed": seed, "run": {"keep_checkpoints": 1, "tensorboard": False}}
    layers = [*_data_layers(study, column), case.set, row.layer, *special, own]
    preset = column.preset or study.preset
    rounds = resolve(preset, layers).training.rounds
    fewer = {"training": {"rounds": min(rounds, max(FEWEST_ROUNDS, round(share * rounds)))}}
    return Planned(seed, resolve(preset, [*layers, fewer, overrides]))


def _data_layers(study: Study, column: DataColumn) -> list[Table]:
    """Return the settings of the study and of a data set, each above those before it.

    A path that the study gives for all of its data sets is meant for those that are read from a file. It has to be
    moved into their layers: a layer that names another data set drops the `data.path` of the layers below it.
    """
    layer = column.layer
    if column.reader not in DATASETS:
        layer = {**layer, "data": {**layer["data"], "name": STAND_IN}}
    if column.preset:
        return [layer]
    shared_data = dict(study.set.get("data", {}))
    path = shared_data.pop("path", "")
    if path and column.reader == FILE_READER:
        layer = {**layer, "data": {"path": path, **layer["data"]}}
    return [{**study.set, "data": shared_data}, layer]


def _missing_method(row: MethodRow) -> Iterator[Lack]:
    name = row.layer["method"]["name"]
    if row.missing:
        yield Lack(row.name, row.missing)
    elif name not in METHODS and name not in NAMES:
        yield Lack(row.name, f"there is no method {name!r} (motley list methods).")


def _missing_size(row: MethodRow, config: Config) -> Iterator[Lack]:
    sizes = config.split.sizes(config.model.sizes)
    if row.whole and not whole_model(config):
        yield Lack(row.name, "no size is the whole model.")
    if row.size and row.size not in sizes:
        yield Lack(row.name, f"size: {unknown('size', row.size, sizes)}")


def _missing_data(study: Study, column: DataColumn, case: Case, overrides: Table) -> Iterator[Lack]:
    if column.reader not in DATASETS:
        yield Lack(column.name, "there is no reader for this data set (motley list datasets).")
        return
    # Only the files matter here. A whole configuration cannot be resolved without a method's settings.
    files: dict[str, Any] = {"root": "", "path": ""}
    for layer in (*_data_layers(study, column), case.set, overrides):
        files |= {key: value for key, value in layer.get("data", {}).items() if key in files}
    data = DataSettings.model_construct(**files)
    if reason := _unreadable(column.reader, data.root_path or data_root(), data.file_path):
        yield Lack(column.name, reason)


@cache
def _unreadable(name: str, root: Path, path: Path | None) -> str:
    """Return why a data set cannot be loaded, or nothing. The result is kept: many cells ask for the same data."""
    try:
        load_dataset(name, root=root, path=path)
    except MotleyError as error:
        if path is None and name == FILE_READER:
            return f'{str(error).splitlines()[0]} Name it in the study: [[data]] path = "...".'
        # The reader's own message ends with this advice if the files were not found in the folder of data sets.
        advice = " Set MOTLEY_DATA to the folder that holds it." if "MOTLEY_DATA" in str(error) else ""
        return str(error).splitlines()[0] + advice
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
