"""The declaration of a study: a TOML file with methods, data sets, cases, seeds and paper numbers.

A study's table has one line per method and one column per case of each data set. Each cell has one
run per seed. A cell's configuration is built in layers: the study's preset, `set`, the data set,
the case, the method and the exceptions that match, each overriding those before it. Built-in
studies and users' files are read in the same way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from motley.config import absolute_paths, read_toml
from motley.core.errors import MotleyError, unknown
from motley.data import DATASETS
from motley.settings import Settings, validate
from motley.studies.measures import Measure


def _check_tables(layer: dict[str, Any]) -> dict[str, Any]:
    """Reject, for example, `set.data = 3`. A study adds keys to the tables data and method."""
    for name in ("data", "method"):
        if not isinstance(layer.get(name, {}), dict):
            raise ValueError(f"{name} should be a table, for example set.{name}.name")
    return layer


#: Settings as nested tables, as in the configuration file of a run.
Layer: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_tables)]
#: The readers of users' data files, which take a path. A .npz file is read by the first.
FILE_READERS = ("npz", "files")


class PaperNumber(Settings):
    """A number from a paper, with its standard deviation if the paper gives one."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:g}" if self.std is None else f"{self.mean:g} ± {self.std:g}"


def _parse_number(value: Any) -> Any:
    """Parse 67.8, "67.8 ± 3.2", or "" if the paper has no number."""
    if value == "":
        return None
    if isinstance(value, str):
        mean, _, std = value.partition("±")
        try:
            return {"mean": float(mean), "std": float(std) if std else None}
        except ValueError:
            raise ValueError('should be a number, "mean ± deviation", or "" for none') from None
    return {"mean": value} if isinstance(value, int | float) else value


PaperNumbers = tuple[Annotated[PaperNumber | None, BeforeValidator(_parse_number)], ...]


class MethodRow(Settings):
    """A line of the table."""

    name: str
    set: Layer = Field(default_factory=dict)
    """Settings of this line. If they do not include `method.name`, it is `name`."""
    against: str = ""
    """The line that this one is compared with, seed by seed."""
    whole: bool = False
    """Show the accuracy of the whole model instead of the mean over all sizes."""
    size: str = ""
    """Show the accuracy of this size instead of the mean over all sizes."""
    missing: str = ""
    """Why the line cannot run, if Motley lacks settings that it needs. Empty: it can run."""
    paper: dict[str, PaperNumbers] = Field(default_factory=dict)
    """Data set -> the paper's number for each case, in percent (or rounds)."""

    @property
    def layer(self) -> Layer:
        """The settings of this line, including its method."""
        return {**self.set, "method": {"name": self.name, **self.set.get("method", {})}}


class DataColumn(Settings):
    """A data set of the table."""

    name: str
    """The column's title. Also the data set's name, unless `path` or `set.data.name` is given."""
    path: str = ""
    """A user's data file. With a path, `name` can be any title: a study can have several files."""
    preset: str = ""
    """Replaces the study's preset and its `set`."""
    set: Layer = Field(default_factory=dict)
    optional: bool = Field(default=False, validation_alias=AliasChoices("optional", "asked"))
    """Run only if --data names it: a substitute that is not in the paper. Formerly `asked`."""

    @property
    def reader(self) -> str:
        """The name of the data set's reader."""
        table = self.set.get("data", {})
        if "name" in table:
            return str(table["name"])
        if self.name not in DATASETS and (self.path or "path" in table):
            path = self.path or str(table["path"])
            return FILE_READERS[0] if path.endswith(".npz") else FILE_READERS[1]
        return self.name

    @property
    def layer(self) -> Layer:
        """The settings of this data set, including its name and file."""
        table = {**self.set.get("data", {}), "name": self.reader}
        if self.path:
            table["path"] = self.path
        return {**self.set, "data": table}


class Case(Settings):
    """One column per data set, such as a degree of heterogeneity, a batch size or a layer."""

    name: str = ""
    set: Layer = Field(default_factory=dict)
    measure: Measure | None = None
    """The measure of this column, if it differs from the study's."""


class CellException(Settings):
    """Settings for some cells only. An empty list matches everything."""

    methods: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    set: Layer

    def matches(self, method: str, data: str, case: str) -> bool:
        """Return whether these settings apply to a cell."""
        for names, name in ((self.methods, method), (self.data, data), (self.cases, case)):
            if names and name not in names:
                return False
        return True


class Study(Settings):
    """A study: methods compared over data sets, cases and seeds."""

    name: str
    summary: str = ""
    paper: str = ""
    note: str = ""
    """Remarks for readers of the table."""
    scale: Literal["quick", "half", "full"] = "full"
    """The scale if --scale is not given. For built-in studies of papers it is "quick"."""
    preset: str = ""
    set: Layer = Field(default_factory=dict)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(1,), min_length=1)
    measure: Measure = Measure("mean-of-last-k")
    needs: dict[str, str] = Field(default_factory=dict)
    """Settings that only the user can provide -> a description of them."""
    methods: tuple[MethodRow, ...] = Field(min_length=1)
    data: tuple[DataColumn, ...] = Field(min_length=1)
    cases: tuple[Case, ...] = (Case(),)
    exceptions: tuple[CellException, ...] = ()
    targets: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Data set -> the target accuracy of `rounds-to` in percent, one per case."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds_are_a_list(cls, value: Any) -> Any:
        """Reject `seeds = 3`, which other settings would accept as a list of one value."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            numbers = ", ".join(map(str, range(1, value + 1))) if value <= 5 else f"1, ..., {value}"
            several = f"seeds = [{numbers}] for {value} seeds, or " if value > 1 else ""
            raise ValueError(
                f"should be a list, because one number could be a seed or how many there are: "
                f"write {several}seeds = [{value}] for the seed {value}"
            )
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Study:
        """Check that names are unique and that references between the tables exist."""
        methods = [row.name for row in self.methods]
        data = [column.name for column in self.data]
        cases = [case.name for case in self.cases]
        tables: dict[str, Sequence[object]] = {
            "methods": methods,
            "data": data,
            "cases": cases,
            "seeds": self.seeds,
        }
        for table, names in tables.items():
            twice = [name for number, name in enumerate(names) if name in names[:number]]
            if twice:
                raise self._error(table, f"{twice[0]!r} is given twice.")
        for row in self.methods:
            if row.size and row.whole:
                raise self._error(row.name, "give either size or whole, not both.")
            if row.against and row.against not in methods:
                raise self._error(f"{row.name}.against", unknown("line", row.against, methods))
            self._check_one_value_per_case(f"{row.name}.paper", row.paper, data)
        self._check_one_value_per_case("targets", self.targets, data)
        for exception in self.exceptions:
            self._check_known(exception.methods, methods)
            self._check_known(exception.data, data)
            self._check_known(exception.cases, cases)
        return self

    def _check_one_value_per_case(
        self, key: str, values_by_data: Mapping[str, Sequence[object]], data: list[str]
    ) -> None:
        for name, values in values_by_data.items():
            if name not in data:
                raise self._error(key, unknown("data set", name, data))
            if len(values) != len(self.cases):
                problem = f"has {len(values)} numbers; {len(self.cases)} are needed"
                raise self._error(f"{key}.{name}", f'{problem}, one per case ("" for none).')

    def _check_known(self, names: Sequence[str], known: list[str]) -> None:
        for name in names:
            if name not in known:
                raise self._error("exceptions", unknown("name", name, known))

    def _error(self, key: str, problem: str) -> MotleyError:
        return MotleyError(f"study {self.name!r}, {key}: {problem}")


def studies() -> dict[str, Study]:
    """Return the built-in studies by name."""
    built_in = {}
    files = resources.files("motley.studies").iterdir()
    for file in sorted(files, key=lambda file: file.name):
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            # A paper's table takes hours at full scale, so "quick" is the default here.
            built_in[name] = _study(name, {"scale": "quick", **values})
    return built_in


def load_study(name: str) -> Study:
    """Return a built-in study by its name, or a user's study by its .toml file."""
    if name.endswith(".toml"):
        file = Path(name)
        values = read_toml(file)
        if not {"methods", "data"} & set(values) or isinstance(values.get("data"), dict):
            raise MotleyError(
                f"{file}: is no study, which has a list [[data]] and a list [[methods]]. If it is "
                f"the configuration of one run: motley run {file}"
            )
        return _study(file.stem, _absolute_paths(values, file.parent))
    built_in = studies()
    if name not in built_in:
        problem = unknown("study", name, built_in)
        raise MotleyError(f"{problem} A study of your own is a file that ends in .toml.")
    return built_in[name]


def _study(name: str, values: Layer) -> Study:
    return validate(Study, {"name": name, **values}, where=f"study {name}")


def _absolute_paths(values: Layer, folder: Path) -> Layer:
    """Return a study's values with all paths made absolute, relative to the folder of its file.

    The study can then be started from any folder, and moved together with its data.
    """
    result = dict(values)
    if "set" in values:
        result["set"] = _absolute_paths_of_layer(values["set"], folder)
    for table in ("data", "cases", "methods", "exceptions"):
        # Values of the wrong type are kept: validation rejects them later and names their keys.
        if not isinstance(values.get(table), list):
            continue
        entries = []
        for entry in values[table]:
            if isinstance(entry, dict) and "set" in entry:
                entry = {**entry, "set": _absolute_paths_of_layer(entry["set"], folder)}
            if table == "data" and isinstance(entry, dict) and isinstance(entry.get("path"), str):
                entry = {**entry, "path": _absolute_path(entry["path"], folder)}
            entries.append(entry)
        result[table] = entries
    return result


def _absolute_paths_of_layer(layer: Any, folder: Path) -> Any:
    return absolute_paths(layer, folder) if isinstance(layer, dict) else layer


def _absolute_path(path: str, folder: Path) -> str:
    """Return an absolute path. An empty path stays empty, because it means "none"."""
    return str((folder / Path(path).expanduser()).absolute()) if path else ""
