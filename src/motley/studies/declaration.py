"""What a study is: a TOML file that names methods, data sets, cases and seeds, and the paper's own numbers.

A study's table has a line for every method and a column for every case of every data set; each cell is one run a seed.
A cell's configuration is laid up from the study's preset, `set`, the data set, the case, the method and the exceptions
that match, each above those before it. Studies of the library and of the user are read alike.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from motley.config import read_toml
from motley.errors import MotleyError, unknown
from motley.settings import Settings, validate
from motley.studies.measures import Measure

Layer: TypeAlias = dict[str, Any]
"""Settings as in a run's file."""


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
    """Its settings; where they choose no method, the method is the one that is called `name`."""
    against: str = ""
    """The line it is compared with, seed by seed."""
    whole: bool = False
    """Its numbers are those of the whole model, not of the mean over all sizes."""
    missing: str = ""
    """Why the line cannot run, where the settings that it stands for do not exist; empty: it can."""
    paper: dict[str, Numbers] = Field(default_factory=dict)
    """Data set -> the paper's number for each case, in percent (or rounds)."""

    @property
    def layer(self) -> Layer:
        """What the line sets."""
        return {**self.set, "method": {"name": self.name, **self.set.get("method", {})}}


class DataColumn(Settings):
    """A data set of the table."""

    name: str
    preset: str = ""
    """Replaces the study's own preset and its `set`."""
    set: Layer = Field(default_factory=dict)
    asked: bool = False
    """Runs only where --data names it: a stand-in the paper does not have."""

    @property
    def layer(self) -> Layer:
        """What the data set sets."""
        return {**self.set, "data": {"name": self.name, **self.set.get("data", {})}}


class Case(Settings):
    """A column for each data set: a degree of heterogeneity, a batch size, a layer that is looked at."""

    name: str = ""
    set: Layer = Field(default_factory=dict)
    measure: Measure | None = None
    """What the cell shows, where it is not what the study shows."""


class Exceptional(Settings):
    """Settings of some cells only; an empty list matches all."""

    methods: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    set: Layer

    def matches(self, method: str, data: str, case: str) -> bool:
        """Tell whether a cell is meant."""
        pairs = ((self.methods, method), (self.data, data), (self.cases, case))
        return all(not names or name in names for names, name in pairs)


class Study(Settings):
    """A declared sweep."""

    name: str
    summary: str = ""
    paper: str = ""
    note: str = ""
    """What a reader of the table has to know."""
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
    """Data set -> the accuracy in percent that `rounds-to` looks for, one a case."""

    @model_validator(mode="after")
    def _names_fit(self) -> Study:
        methods, data = [row.name for row in self.methods], [column.name for column in self.data]
        cases = [case.name for case in self.cases]
        for kind, names in (("methods", methods), ("data", data), ("cases", cases), ("seeds", self.seeds)):
            if len(set(names)) != len(names):
                raise MotleyError(f"study {self.name!r}, {kind}: a name is given twice.")
        for row in self.methods:
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
                    f'{len(self.cases)} are needed, one a case ("" for none).'
                )


def studies() -> dict[str, Study]:
    """Return the library's own studies, by name."""
    files = sorted(resources.files("motley.studies").iterdir(), key=lambda file: file.name)
    return {
        (name := file.name.removesuffix(".toml")): _study(name, tomllib.loads(file.read_text(encoding="utf-8")))
        for file in files
        if file.name.endswith(".toml")
    }


def load_study(name: str) -> Study:
    """Return a study of the library by name, or one of the user's by its file."""
    if name.endswith(".toml"):
        file = Path(name)
        return _study(file.stem, read_toml(file))
    own = studies()
    if name not in own:
        raise MotleyError(f"{unknown('study', name, own)} A sweep of your own is a file whose name ends in .toml.")
    return own[name]


def _study(name: str, values: Layer) -> Study:
    return validate(Study, {"name": name, **values}, where=f"study {name}")
