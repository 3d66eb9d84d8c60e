"""The declaration of a study: a TOML file with methods, data sets, cases, seeds, and the paper's own numbers.

A study's table has one line per method and one column per case of each data set; each cell has one run per seed.
A cell's configuration is built in layers: the study's preset, `set`, the data set, the case, the method and the
exceptions that match, each on top of those before it. Built-in studies and the user's own files are read the same way.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from motley.config import absolute_paths, read_toml
from motley.core.errors import MotleyError, unknown
from motley.data import DATASETS
from motley.settings import Settings, validate
from motley.studies.measures import Measure


def _check_tables(layer: dict[str, Any]) -> dict[str, Any]:
    """Reject `set.data = 3`: a study adds keys to these two tables."""
    for name in ("data", "method"):
        if not isinstance(layer.get(name, {}), dict):
            raise ValueError(f"{name} should be a table, for example set.{name}.name")
    return layer


#: Settings as in a run's file.
Layer: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_tables)]
#: The reader of the user's own data files, the only one that takes a path.
FILE_READER = "npz"


class Number(Settings):
    """A number of a paper, and its standard deviation where the paper gives one."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:g}" + (f" ± {self.std:g}" if self.std is not None else "")


def _number(value: Any) -> Any:
    """Read 67.8, "67.8 ± 3.2", or "" where the paper has none."""
    if value == "":
        return None
    if isinstance(value, str):
        mean, _, std = value.partition("±")
        try:
            return {"mean": float(mean), "std": float(std) if std else None}
        except ValueError:
            raise ValueError('should be a number, "mean ± deviation", or "" for none') from None
    return {"mean": value} if isinstance(value, int | float) else value


Numbers = tuple[Annotated[Number | None, BeforeValidator(_number)], ...]


class MethodRow(Settings):
    """A line of the table."""

    name: str
    set: Layer = Field(default_factory=dict)
    """Its settings. If they choose no method, the method is the one that is called `name`."""
    against: str = ""
    """The line that it is compared with, seed by seed."""
    whole: bool = False
    """Show the accuracy of the whole model instead of the mean over all sizes."""
    size: str = ""
    """Show the accuracy of this size instead of the mean over all sizes."""
    missing: str = ""
    """Why the line cannot run, if settings that it needs do not exist. Empty: it can run."""
    paper: dict[str, Numbers] = Field(default_factory=dict)
    """Data set -> the paper's number for each case, in percent (or rounds)."""

    @property
    def layer(self) -> Layer:
        """The settings of this line, its method included."""
        return {**self.set, "method": {"name": self.name, **self.set.get("method", {})}}


class DataColumn(Settings):
    """A data set of the table."""

    name: str
    """The column's title, and the data set's name unless `path` or `set.data.name` says otherwise."""
    path: str = ""
    """The user's own data file. With a path, `name` can be any title, so that a study can have several files."""
    preset: str = ""
    """Replaces the study's own preset and its `set`."""
    set: Layer = Field(default_factory=dict)
    asked: bool = False
    """Runs only if --data names it: a stand-in that the paper does not have."""

    @property
    def reader(self) -> str:
        """The name of the data set's reader."""
        table = self.set.get("data", {})
        if "name" in table:
            return str(table["name"])
        if self.name not in DATASETS and (self.path or "path" in table):
            return FILE_READER
        return self.name

    @property
    def layer(self) -> Layer:
        """The settings of this data set, its name and file included."""
        table = {**self.set.get("data", {}), "name": self.reader}
        if self.path:
            table["path"] = self.path
        return {**self.set, "data": table}


class Case(Settings):
    """One column per data set: a degree of heterogeneity, a batch size, a layer that is looked at."""

    name: str = ""
    set: Layer = Field(default_factory=dict)
    measure: Measure | None = None
    """The measure of this column, if it is not the study's."""


class Exceptional(Settings):
    """Settings of some cells only. An empty list matches all."""

    methods: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    set: Layer

    def matches(self, method: str, data: str, case: str) -> bool:
        """Return whether a cell gets these settings."""
        pairs = ((self.methods, method), (self.data, data), (self.cases, case))
        return all(not names or name in names for names, name in pairs)


class Study(Settings):
    """A declared sweep."""

    name: str
    summary: str = ""
    paper: str = ""
    note: str = ""
    """Remarks that a reader of the table needs."""
    scale: Literal["quick", "half", "full"] = "full"
    """The scale that runs if --scale is not given. Built-in studies of papers say "quick"."""
    preset: str = ""
    set: Layer = Field(default_factory=dict)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (1,)
    measure: Measure = Measure("mean-of-last-k")
    needs: dict[str, str] = Field(default_factory=dict)
    """Settings that only the user can give -> what they are."""
    methods: tuple[MethodRow, ...] = Field(min_length=1)
    data: tuple[DataColumn, ...] = Field(min_length=1)
    cases: tuple[Case, ...] = (Case(),)
    exceptions: tuple[Exceptional, ...] = ()
    targets: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Data set -> the accuracy in percent that `rounds-to` looks for, one per case."""

    @model_validator(mode="after")
    def _names_fit(self) -> Study:
        methods, data = [row.name for row in self.methods], [column.name for column in self.data]
        cases = [case.name for case in self.cases]
        for kind, names in (("methods", methods), ("data", data), ("cases", cases), ("seeds", self.seeds)):
            if len(set(names)) != len(names):
                raise MotleyError(f"study {self.name!r}, {kind}: a name is given twice.")
        for row in self.methods:
            if row.size and row.whole:
                raise MotleyError(f"study {self.name!r}, {row.name}: give either size or whole, not both.")
            if row.against and row.against not in methods:
                raise MotleyError(f"study {self.name!r}, {row.name}.against: {unknown('line', row.against, methods)}")
            self._fits_cases(f"{row.name}.paper", row.paper, data)
        self._fits_cases("targets", self.targets, data)
        for exceptional in self.exceptions:
            for given, known in ((exceptional.methods, methods), (exceptional.data, data), (exceptional.cases, cases)):
                for name in given:
                    if name not in known:
                        raise MotleyError(f"study {self.name!r}, exceptions: {unknown('name', name, known)}")
        return self

    def _fits_cases(self, where: str, table: dict[str, Any], data: list[str]) -> None:
        for name, values in table.items():
            if name not in data:
                raise MotleyError(f"study {self.name!r}, {where}: {unknown('data set', name, data)}")
            if len(values) != len(self.cases):
                raise MotleyError(
                    f"study {self.name!r}, {where}.{name}: has {len(values)} numbers; "
                    f'{len(self.cases)} are needed, one per case ("" for none).'
                )


def studies() -> dict[str, Study]:
    """Return the built-in studies by name."""
    found = {}
    for file in sorted(resources.files("motley.studies").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            # A paper's table takes hours: unless its file says otherwise, it is tried in short first.
            found[name] = _study(name, {"scale": "quick", **values})
    return found


def load_study(name: str) -> Study:
    """Return a built-in study by its name, or the user's own by its file."""
    if name.endswith(".toml"):
        file = Path(name)
        return _study(file.stem, _from_folder(read_toml(file), file.parent))
    built_in = studies()
    if name not in built_in:
        raise MotleyError(f"{unknown('study', name, built_in)} A study of your own is a file that ends in .toml.")
    return built_in[name]


def _study(name: str, values: Layer) -> Study:
    return validate(Study, {"name": name, **values}, where=f"study {name}")


def _from_folder(values: Layer, folder: Path) -> Layer:
    """Return a study's values with all paths taken from the folder of its file.

    The study can then be started from any folder, and its data can be moved together with it.
    """
    result = dict(values)
    if "set" in values:
        result["set"] = _paths_from_folder(values["set"], folder)
    for kind in ("data", "cases", "methods", "exceptions"):
        if not isinstance(values.get(kind), list):
            continue
        entries = []
        for entry in values[kind]:
            if isinstance(entry, dict) and "set" in entry:
                entry = {**entry, "set": _paths_from_folder(entry["set"], folder)}
            if kind == "data" and isinstance(entry, dict) and isinstance(entry.get("path"), str):
                entry = {**entry, "path": _whole_path(entry["path"], folder)}
            entries.append(entry)
        result[kind] = entries
    return result


def _paths_from_folder(layer: Any, folder: Path) -> Any:
    """Return a layer with absolute paths. A layer that is no table is rejected later, with the name of its key."""
    return absolute_paths(layer, folder) if isinstance(layer, dict) else layer


def _whole_path(path: str, folder: Path) -> str:
    """Return an absolute path; an empty one stays empty, because it stands for "none"."""
    return str((folder / Path(path).expanduser()).absolute()) if path else ""
