"""What a report is about: runs, put together into series over seeds, and the series that belong in one picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motley.config import Config
from motley.errors import MotleyError
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog, Outcome, outcome
from motley.studies.results import read_saved


@dataclass(frozen=True)
class Run:
    """A run as its folder has it."""

    path: Path
    config: Config
    lines: list[dict[str, Any]]
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run's folder."""
        folder = RunFolder.open(path)
        return cls(path, folder.read_config(), MetricsLog(folder.metrics).read(), folder.read_environment())

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The rounds that were evaluated."""
        return [line for line in self.lines if "accuracy" in line]

    def outcome(self, targets: tuple[float, ...]) -> Outcome:
        """Return what the run came to."""
        return outcome(self.lines, self.config.evaluation.last_k, targets)


@dataclass
class Series:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run] = field(default_factory=list)

    def curve(self, size: str) -> tuple[list[int], list[list[float]]]:
        """Return the rounds that every run has evaluated, and for each the accuracies of a size, in percent."""
        curves = [{line["round"]: 100 * line["accuracy"][size] for line in run.evaluated} for run in self.runs]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        return rounds, [[curve[number] for curve in curves] for number in rounds]


@dataclass
class Panel:
    """Series that are compared with each other."""

    title: str
    series: dict[str, Series] = field(default_factory=dict)

    def add(self, label: str, run: Run) -> None:
        """Take in a run of a series."""
        self.series.setdefault(label, Series(label)).runs.append(run)

    @property
    def sizes(self) -> list[str]:
        """All that has an accuracy: the mean over sizes first, then every size, in the order of the configurations."""
        names = dict.fromkeys(size for run in self.runs() for size in run.config.model.sizes)
        return ["mean", *names]

    def runs(self) -> Iterator[Run]:
        """Return every run."""
        for series in self.series.values():
            yield from series.runs


@dataclass
class Material:
    """All that a report shows."""

    studies: list[dict[str, Any]] = field(default_factory=list)
    panels: dict[str, Panel] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """The names of all series, each once."""
        return list(dict.fromkeys(label for panel in self.panels.values() for label in panel.series))

    @property
    def runs(self) -> list[Run]:
        """All runs, each once."""
        return list({run.path.resolve(): run for panel in self.panels.values() for run in panel.runs()}.values())


def gather(paths: Iterable[Path]) -> Material:
    """Read runs and studies by their folders."""
    material = Material()
    plain: list[Run] = []
    for path in paths:
        if (path / "study.json").exists():
            _add_study(material, path)
        elif (path / "config.toml").exists():
            plain.append(Run.read(path))
        else:
            raise MotleyError(f"{path} is neither a run (config.toml) nor a study (study.json).")
    for run, label in zip(plain, _labels([run.config for run in plain]), strict=True):
        _panel(material, _setting(run.config)).add(label, run)
    return material


def _add_study(material: Material, folder: Path) -> None:
    saved = read_saved(folder)
    material.studies.append(saved)
    for cell in saved["cells"]:
        for path in cell["runs"].values():
            if (folder / path / "config.toml").exists():
                _panel(material, cell["column"]).add(cell["method"], Run.read(folder / path))


def _panel(material: Material, title: str) -> Panel:
    return material.panels.setdefault(title, Panel(title))


def _setting(config: Config) -> str:
    partition = config.data.partition
    alpha = getattr(partition, "alpha", None)
    return f"{config.data.name}, {partition.name}" + (f" {alpha:g}" if alpha is not None else "")


def _labels(configs: list[Config]) -> list[str]:
    """Name runs by their method, and by every other setting (but the seed) in which they differ."""
    tables = [dict(_flat(config.model_dump(mode="json", exclude={"seed", "run", "preset"}))) for config in configs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    differing = [key for key in keys if len({json.dumps(table.get(key)) for table in tables}) > 1]
    beside = [key for key in differing if not key.startswith(("data.", "method.name", "method.inco"))]
    return [
        ", ".join([method_title(config), *(f"{key} = {table[key]}" for key in beside if key in table)])
        for config, table in zip(configs, tables, strict=True)
    ]


def method_title(config: Config) -> str:
    """Return a run's method, and its InCo."""
    inco = f" + InCo ({config.method.inco.preset})" if config.method.inco.active else ""
    return config.method.name + inco


def _flat(table: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value
