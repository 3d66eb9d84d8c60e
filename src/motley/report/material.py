"""The runs of a report: grouped into series over seeds, and into panels of series that are compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from motley.config import Config
from motley.core.errors import MotleyError
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog, Outcome, outcome
from motley.studies.results import read_saved
from motley.studies.sweep import IMMATERIAL

#: Series are named by the settings in which they differ, up to this many. With more, folder names are easier to read.
MOST_SETTINGS_IN_A_LABEL = 2
#: A longer value (a file's path, a list) makes a bad label.
LONGEST_VALUE_IN_A_LABEL = 24
ABSENT = "-"


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder."""

    path: Path
    config: Config
    lines: list[dict[str, Any]]
    #: Versions and hardware; empty if the file is missing or damaged.
    environment: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run's folder."""
        folder = RunFolder.open(path)
        return cls(path, folder.read_config(), MetricsLog(folder.metrics).read(), _read_environment(folder.environment))

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The lines of the rounds that were evaluated."""
        return [line for line in self.lines if "accuracy" in line]

    @property
    def rounds_done(self) -> int:
        """The number of the last finished round."""
        return self.lines[-1]["round"] if self.lines else 0

    def outcome(self, targets: tuple[float, ...]) -> Outcome:
        """Return the run's accuracies, rounds to targets, traffic and time."""
        return outcome(self.lines, self.config.evaluation.last_k, targets)


def _read_environment(file: Path) -> dict[str, Any]:
    """Return the versions and hardware of a run. A damaged file must not cost the whole report: it counts as empty."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Series:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run] = field(default_factory=list)
    #: The accuracy that this line stands for: the mean over sizes, or one size if a study says so.
    headline: str = "mean"

    @property
    def by_seed(self) -> dict[int, list[Run]]:
        """Seed -> its runs. A second run of a seed is no second sample: deviations are over distinct seeds."""
        groups: dict[int, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.config.seed, []).append(run)
        return groups

    @property
    def count(self) -> str:
        """The number of seeds, and of runs if there are more: "3 seeds", "1 seed, 2 runs"."""
        seeds = len(self.by_seed)
        text = f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"
        return text if len(self.runs) == seeds else f"{text}, {len(self.runs)} runs"

    @property
    def repeats(self) -> list[str]:
        """One sentence per seed that was run more than once."""
        sentences = []
        for seed, runs in self.by_seed.items():
            if len(runs) > 1:
                names = ", ".join(run.path.name for run in runs)
                sentences.append(
                    f"{self.label}: {names} are {len(runs)} runs with the same settings and the same seed ({seed}). "
                    "They count as one seed, with the mean of their numbers."
                )
        return sentences

    def key(self, size: str) -> str:
        """Return the name under which metrics have an accuracy; "mean" is replaced by this line's headline."""
        return self.headline if size == "mean" else size

    def curve(self, size: str) -> tuple[list[int], list[list[float]]]:
        """Return the rounds that all runs have evaluated, and for each round one accuracy in percent per seed."""
        size = self.key(size)
        curves: dict[int, list[dict[int, float]]] = {}
        for seed, runs in self.by_seed.items():
            for run in runs:
                accuracies = {}
                for line in run.evaluated:
                    if size in line["accuracy"]:
                        accuracies[line["round"]] = 100 * line["accuracy"][size]
                curves.setdefault(seed, []).append(accuracies)
        all_curves = [curve for of_seed in curves.values() for curve in of_seed]
        rounds = sorted(set.intersection(*(set(curve) for curve in all_curves))) if all_curves else []
        values = []
        for number in rounds:
            values.append([fmean(curve[number] for curve in of_seed) for of_seed in curves.values()])
        return rounds, values


@dataclass
class Panel:
    """Series that are compared with each other."""

    title: str
    series: dict[str, Series] = field(default_factory=dict)

    def add(self, label: str, run: Run, headline: str = "mean") -> None:
        """Add a run to its series. The same folder given twice is one run."""
        series = self.series.setdefault(label, Series(label, headline=headline))
        if all(run.path.resolve() != other.path.resolve() for other in series.runs):
            series.runs.append(run)

    @property
    def distinct(self) -> dict[str, Series]:
        """The series without those that show another size of runs that an earlier series has."""
        found: dict[str, Series] = {}
        seen = set()
        for label, series in self.series.items():
            folders = frozenset(run.path.resolve() for run in series.runs)
            if folders not in seen:
                found[label] = series
            seen.add(folders)
        return found

    @property
    def sizes(self) -> list[str]:
        """All names that have an accuracy: the mean over sizes first, then every size in the order of evaluation."""
        names: dict[str, None] = {"mean": None}
        for run in self.runs():
            if run.evaluated:
                names.update(dict.fromkeys(name for name in run.evaluated[0]["accuracy"] if name != "mean"))
            else:
                names.update(dict.fromkeys(run.config.model.sizes))
        return list(names)

    def runs(self) -> Iterator[Run]:
        """Return every run."""
        for series in self.series.values():
            yield from series.runs


@dataclass
class Material:
    """Everything that a report shows."""

    studies: list[dict[str, Any]] = field(default_factory=list)
    panels: dict[str, Panel] = field(default_factory=dict)
    #: A table of the settings in which runs differ: one line per setting, one column per series.
    differences: list[list[str]] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The labels of all series, each once."""
        return list(dict.fromkeys(label for panel in self.panels.values() for label in panel.series))

    @property
    def runs(self) -> list[Run]:
        """All runs, each once."""
        return list({run.path.resolve(): run for panel in self.panels.values() for run in panel.runs()}.values())


def gather(paths: Iterable[Path]) -> Material:
    """Read runs and studies by their folders."""
    material = Material()
    runs: list[Run] = []
    studies: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        if (path / "study.json").exists():
            studies.append((path, read_saved(path)))
        elif (path / "config.toml").exists():
            runs.append(Run.read(path))
        else:
            raise MotleyError(f"{path} is neither a run (config.toml) nor a study (study.json).")
    for path, saved in studies:
        # Two studies, or two scales of one, can have the same column: their runs must not become one series.
        _add_study(material, path, saved, f"{path.resolve().name}: " if len(studies) > 1 else "")
    _add_runs(material, runs)
    return material


def _add_study(material: Material, folder: Path, saved: dict[str, Any], prefix: str) -> None:
    material.studies.append(saved)
    for cell in saved["cells"]:
        for path in cell["runs"].values():
            if (folder / path / "config.toml").exists():
                panel = _panel(material, prefix + cell["column"])
                panel.add(cell["method"], Run.read(folder / path), cell.get("shows", "mean"))


def _panel(material: Material, title: str) -> Panel:
    return material.panels.setdefault(title, Panel(title))


@dataclass
class _Group:
    """Runs with the same settings apart from the seed."""

    panel: str
    settings: dict[str, Any]
    runs: list[Run]

    @property
    def method(self) -> str:
        return method_title(self.runs[0].config)


def _add_runs(material: Material, runs: Sequence[Run]) -> None:
    groups = _grouped(runs)
    labels, differing = _labels(groups)
    for group, label in zip(groups, labels, strict=True):
        for run in group.runs:
            _panel(material, group.panel).add(label, run)
    if len(groups) > 1 and differing:
        material.differences.append(["", *labels])
        for key in differing:
            material.differences.append([key, *(_shown(group.settings.get(key, ABSENT)) for group in groups)])


def _grouped(runs: Sequence[Run]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for run in runs:
        settings = dict(_flat(run.config.model_dump(mode="json", exclude={**IMMATERIAL, "seed": True})))
        key = json.dumps(settings, sort_keys=True)
        group = groups.setdefault(key, _Group(_setting(run.config), settings, []))
        group.runs.append(run)
    return list(groups.values())


def _setting(config: Config) -> str:
    partition = config.data.partition
    alpha = getattr(partition, "alpha", None)
    return f"{config.data.name}, {partition.name}" + (f" {alpha:g}" if alpha is not None else "")


def _labels(groups: Sequence[_Group]) -> tuple[list[str], list[str]]:
    """Return a label per group, and the settings in which groups differ.

    A label is the method and the settings that differ. If that would be long, or would not tell all groups of a panel
    apart, labels are the folders' names.
    """
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    differing = []
    for key in keys:
        if key.startswith("data."):
            # The panel's title already names the data, so these count only if they differ within a panel.
            panels = {(group.panel, json.dumps(group.settings.get(key))) for group in groups}
            differs = len(panels) > len({panel for panel, _ in panels})
        else:
            differs = len({json.dumps(group.settings.get(key)) for group in groups}) > 1
        if differs:
            differing.append(key)
    # The settings of a method that another run does not have follow from the method's name.
    named = [
        key
        for key in differing
        if not key.startswith(("method.name", "method.inco")) and all(key in group.settings for group in groups)
    ]
    labels = []
    for group in groups:
        labels.append(", ".join([group.method, *(f"{key} = {_shown(group.settings[key])}" for key in named)]))
    values = [_shown(group.settings[key]) for group in groups for key in named]
    short = len(named) <= MOST_SETTINGS_IN_A_LABEL and all(len(value) <= LONGEST_VALUE_IN_A_LABEL for value in values)
    in_panels = [(group.panel, label) for group, label in zip(groups, labels, strict=True)]
    if short and len(set(in_panels)) == len(groups):
        return labels, differing
    return _folder_names(groups), differing


def _folder_names(groups: Sequence[_Group]) -> list[str]:
    names = []
    for group in groups:
        folders = [run.path.resolve().name for run in group.runs]
        names.append(folders[0] if len(folders) == 1 else f"{folders[0]} and {len(folders) - 1} more")
    counts = Counter(names)
    for number, group in enumerate(groups):
        if counts[names[number]] > 1:
            folder = group.runs[0].path.resolve()
            names[number] = f"{folder.parent.name}/{folder.name}"
    if len(set(names)) < len(names):
        names = [str(group.runs[0].path.resolve()) for group in groups]
    return names


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)


def method_title(config: Config) -> str:
    """Return a run's method, and its InCo."""
    inco = f" + InCo ({config.method.inco.variant})" if config.method.inco.active else ""
    return config.method.name + inco


def _flat(table: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value
