"""Expand a study into cells: their configurations, or the reasons why they cannot run here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from motley.config import Config, resolve
from motley.config.paper_names import NAMES
from motley.core.dotted import is_dotted
from motley.core.errors import MotleyError, unknown
from motley.data import DATASETS, load_dataset
from motley.data.dataset import data_root
from motley.data.files.settings import FileSettings
from motley.data.settings import DataSettings
from motley.methods import METHODS
from motley.runs.folder import as_file_name
from motley.runs.plugins import code_digest
from motley.settings import Table, validate
from motley.studies.declaration import (
    FILE_READERS,
    Case,
    DataColumn,
    MethodRow,
    PaperNumber,
    Study,
)
from motley.studies.measures import ROUNDS, SCORES, Measure, whole_model


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
#: Clients train alone: a federation is of use to them only if it does better.
REFERENCE_METHOD = "local"
#: A shortened run has at least this many rounds.
MIN_ROUNDS = 3
#: Replaces a data set that has no reader, to find out whether everything else could run.
SUBSTITUTE_DATASET = "cifar10"
NO_READER = "there is no reader for this data set (motley list datasets)."
#: Settings that do not affect a run's numbers. Runs that differ only in these are the same run.
IMMATERIAL: Any = {
    "run": True,
    "preset": True,
    "data": {"root"},
    "engine": {
        "device",
        "slots",
        "workers",
        "overlap_rounds",
        "client_state_host_gib",
        "client_state_gpu_fraction",
        "flower",
    },
}


@dataclass(frozen=True)
class PlannedRun:
    """A run that a cell needs."""

    seed: int
    config: Config

    @cached_property
    def key(self) -> str:
        """The name of the run's folder. Cells and studies that need the same run share it.

        If the run uses the user's own modules, the name ends in a digest of their files, so that
        runs of edited code are other runs. It is computed once, because a file may be edited while
        the study is running.
        """
        code = code_digest(self.config)
        return f"{self.key_of_settings}-{code}" if code else self.key_of_settings

    @property
    def key_of_settings(self) -> str:
        """The key without the digest of the user's own code.

        The digest in it is over all settings that affect the numbers, including defaults: two
        partitions with default settings are not the same partition.
        """
        values = self.config.model_dump(mode="json", exclude=IMMATERIAL)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        inco = "-inco" if self.config.server.inco.active else ""
        name = as_file_name(f"{self.config.data.name}-{self.config.method.name}")
        return f"{name}{inco}-seed{self.seed}-{digest}"


class Missing(NamedTuple):
    """A line, data set or study that cannot run, and the reason."""

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
    paper: PaperNumber | None
    target: float | None
    #: Whether the cell shows the numbers of the whole model.
    whole: bool = False
    #: The size whose numbers the cell shows; empty for the mean over all sizes.
    size: str = ""
    runs: tuple[PlannedRun, ...] = field(default=())
    #: Why the cell cannot run here; empty if it can.
    missing: tuple[Missing, ...] = ()

    @property
    def is_reference(self) -> bool:
        """Whether the cell is local training alone, the line that others should exceed."""
        return bool(self.runs) and self.runs[0].config.method.name == REFERENCE_METHOD

    @property
    def which_model(self) -> str:
        """A suffix to the method's name if the numbers are not means over all sizes."""
        if self.whole:
            return ", whole model"
        return f", {self.size}" if self.size else ""

    @property
    def column(self) -> str:
        """The title of the cell's column."""
        return ", ".join(part for part in (self.data, self.case) if part)


def plan_cells(
    study: Study,
    scale: str,
    *,
    data: Iterable[str] = (),
    cases: Iterable[str] = (),
    methods: Iterable[str] = (),
    seeds: int = 0,
    overrides: Table | None = None,
    score: str = "",
) -> list[Cell]:
    """Return the cells of a study, column by column.

    `data`, `cases` and `methods` select by name; without them, everything is selected except data
    sets that run only if they are named. `seeds` is the maximum number of seeds; 0 leaves it to
    the scale. `score` is a measure that replaces the study's; papers' numbers of another kind are
    then left out.
    """
    if scale not in SCALES:
        raise MotleyError(f"--scale: {unknown('scale', scale, SCALES)}")
    default_data = [column for column in study.data if not column.optional]
    columns = _select("--data", study.data, list(data), default_data)
    selected_cases = _select("--case", study.cases, list(cases), list(study.cases))
    rows = _select("--method", study.methods, list(methods), list(study.methods))
    max_seeds = seeds or SCALES[scale].seeds or len(study.seeds)
    planner = _Planner(study, SCALES[scale].rounds, study.seeds[:max_seeds], overrides or {})
    planned = []
    for column in columns:
        for case in selected_cases:
            cells = [planner.cell(row, column, case) for row in rows]
            planned.extend(_against_reference(cells))
    if score:
        measure = _measure(score)
        planned = [_with_measure(cell, measure) for cell in planned]
    for cell in planned:
        if cell.runs:
            key = "--score" if score else "measure"
            cell.measure.check_config(cell.runs[0].config, key)
            if cell.measure == ROUNDS and cell.target is None:
                raise MotleyError(
                    f"{key} = {ROUNDS!r}: data set {cell.data!r} has no target. Give one accuracy "
                    f"in percent per case: [targets] with {cell.data} = [80.0]."
                )
    return planned


def num_runs(cells: Iterable[Cell]) -> int:
    """Return the number of different runs of some cells. Cells may share runs."""
    keys: set[str] = set()
    for cell in cells:
        keys.update(run.key for run in cell.runs)
    return len(keys)


def _measure(score: str) -> Measure:
    try:
        return Measure.checked(score)
    except ValueError as error:
        raise MotleyError(f"--score: {error}") from None


def _with_measure(cell: Cell, measure: Measure) -> Cell:
    """Return a cell with another measure. The paper's number is dropped if it is about another
    quantity: rounds, for example, are not compared with accuracies.
    """
    both_are_scores = measure in SCORES and cell.measure in SCORES
    paper = cell.paper if both_are_scores or measure == cell.measure else None
    return replace(cell, measure=measure, paper=paper)


def _against_reference(cells: list[Cell]) -> list[Cell]:
    """Compare the lines of a column with local training alone, unless they name another line."""
    reference = next((cell.method for cell in cells if cell.is_reference), "")
    compared = []
    for cell in cells:
        if reference and not cell.against and cell.method != reference:
            cell = replace(cell, against=reference)
        compared.append(cell)
    return compared


def _select(
    option: str, declared: Iterable[Any], names: list[str], default: list[Any]
) -> list[Any]:
    by_name = {item.name: item for item in declared}
    for name in names:
        if name not in by_name:
            raise MotleyError(f"{option} {name}: {unknown('name', name, by_name)}")
    return [by_name[name] for name in names] or default


@dataclass(frozen=True)
class _Planner:
    """Makes the cells of one study at one scale."""

    study: Study
    #: Fraction of the rounds that is run.
    rounds_fraction: float
    seeds: Sequence[int]
    #: The user's overrides, above all layers of the study.
    overrides: Table

    def cell(self, row: MethodRow, column: DataColumn, case: Case) -> Cell:
        """Return one cell, with its runs or with the reasons why it cannot run."""
        study = self.study
        runs: tuple[PlannedRun, ...] = ()
        missing = list(_missing_method(row))
        if not missing:
            try:
                runs = tuple(self._run(seed, row, column, case) for seed in self.seeds)
                missing.extend(_missing_needs(study, column, runs[0].config))
                missing.extend(_missing_size(row, runs[0].config))
            except MotleyError as error:
                missing.append(Missing(row.name, str(error).splitlines()[0]))
        missing.extend(_missing_data(study, column, case, self.overrides))
        number = study.cases.index(case)
        paper = row.paper.get(column.name)
        targets = study.targets.get(column.name)
        return Cell(
            method=row.name,
            data=column.name,
            case=case.name,
            measure=case.measure or study.measure,
            against=row.against,
            paper=paper[number] if paper else None,
            target=targets[number] if targets else None,
            whole=row.whole,
            size=row.size,
            runs=() if missing else runs,
            missing=tuple(missing),
        )

    def _run(self, seed: int, row: MethodRow, column: DataColumn, case: Case) -> PlannedRun:
        layers = [*_data_layers(self.study, column), case.set, row.layer]
        for exception in self.study.exceptions:
            if exception.matches(row.name, column.name, case.name):
                layers.append(exception.set)
        layers.append({"seed": seed, "run": {"keep_checkpoints": 1, "tensorboard": False}})
        preset = column.preset or self.study.preset
        # The scale applies to the study's rounds. The user's overrides come after it and may set
        # any number of rounds.
        rounds = resolve(preset, layers).training.rounds
        scaled = min(rounds, max(MIN_ROUNDS, round(self.rounds_fraction * rounds)))
        layers.append({"training": {"rounds": scaled}})
        return PlannedRun(seed, resolve(preset, [*layers, self.overrides]))


def _data_layers(study: Study, column: DataColumn) -> list[Table]:
    """Return the settings of the study and of a data set, each overriding those before it.

    A study may give one path, and how to read it (`data.files`), for all data sets that are read
    from a file. These settings are moved into the layers of the data sets, because a layer that
    names another data set drops them from the layers below it.
    """
    layer = column.layer
    if column.reader not in DATASETS:
        layer = {**layer, "data": {**layer["data"], "name": SUBSTITUTE_DATASET}}
    if column.preset:
        return [layer]
    shared_data = dict(study.set.get("data", {}))
    of_files = {}
    for key in ("path", "files"):
        if key in shared_data:
            of_files[key] = shared_data.pop(key)
    if of_files and column.reader in FILE_READERS:
        layer = {**layer, "data": {**of_files, **layer["data"]}}
    return [{**study.set, "data": shared_data}, layer]


def _missing_method(row: MethodRow) -> Iterator[Missing]:
    """Yield the reason if Motley lacks the line's method, or settings that it needs."""
    name = row.layer["method"]["name"]
    if row.missing:
        yield Missing(row.name, row.missing)
    elif is_dotted(name):
        try:
            METHODS.entry(name, "method.name")
        except MotleyError as error:
            yield Missing(row.name, str(error))
    elif name not in METHODS and name not in NAMES:
        yield Missing(row.name, f"there is no method {name!r} (motley list methods).")


def missing_in_motley(study: Study) -> list[Missing]:
    """Return the methods, data set readers and files of a user that a study lacks.

    No data set is opened and no configuration is built, so this is quick for all studies.
    """
    missing: list[Missing] = []
    for row in study.methods:
        missing.extend(_missing_method(row))
    for column in study.data:
        if column.reader not in DATASETS:
            missing.append(Missing(column.name, NO_READER))
    for key, description in study.needs.items():
        missing.append(Missing(key, f"needs {description}: --set {key}=FILE."))
    return missing


def _missing_size(row: MethodRow, config: Config) -> Iterator[Missing]:
    """Yield the reason if the size that the line shows does not exist."""
    sizes = config.split.sizes(config.model.sizes)
    if row.whole and not whole_model(config):
        yield Missing(row.name, "no size is the whole model.")
    if row.size and row.size not in sizes:
        yield Missing(row.name, f"size: {unknown('size', row.size, sizes)}")


def _missing_data(
    study: Study, column: DataColumn, case: Case, overrides: Table
) -> Iterator[Missing]:
    if column.reader not in DATASETS:
        yield Missing(column.name, NO_READER)
        return
    # Only the files matter here. The whole configuration cannot be resolved without a method.
    files: dict[str, Any] = {"root": "", "path": ""}
    how: dict[str, Any] = {}
    for layer in (*_data_layers(study, column), case.set, overrides):
        data_table = layer.get("data", {})
        for key in files:
            if key in data_table:
                files[key] = data_table[key]
        how.update(data_table.get("files", {}))
    data = DataSettings.model_construct(**files)
    root = data.root_path or data_root()
    try:
        reading = validate(FileSettings, how, "data.files")
    except MotleyError as error:
        yield Missing(column.name, str(error))
        return
    reason = _why_unreadable(column.reader, root, data.file_path, reading)
    if reason:
        yield Missing(column.name, reason)


@cache
def _why_unreadable(name: str, root: Path, path: Path | None, files: FileSettings) -> str:
    """Return why a data set cannot be loaded, or an empty string.

    Cached, because many cells use the same data.
    """
    try:
        load_dataset(name, root=root, path=path, files=files)
    except MotleyError as error:
        if path is None and name in FILE_READERS:
            return f'{str(error).splitlines()[0]} Name it in the study: [[data]] path = "...".'
        # A later line of the reader's message says so if the files are not in the data folder.
        not_found = "MOTLEY_DATA" in str(error)
        advice = ""
        if not_found:
            advice = (
                f" Download it with `motley data fetch {name}`, "
                "or set MOTLEY_DATA to the folder that contains it."
            )
        return str(error).splitlines()[0] + advice
    return ""


def _missing_needs(study: Study, column: DataColumn, config: Config) -> Iterator[Missing]:
    """Yield the settings that only the user can provide and that are empty."""
    if column.preset:
        return
    values = config.model_dump()
    for key, description in study.needs.items():
        value: Any = values
        for name in key.split("."):
            value = value[name]
        if not value:
            yield Missing(study.name, f"needs {description}: --set {key}=FILE.")
