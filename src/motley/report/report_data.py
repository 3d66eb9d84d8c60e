"""The data of a report: runs, grouped into series over seeds, and panels of comparable series."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from motley.config import Config
from motley.core.errors import MotleyError
from motley.files import read_json_object
from motley.runs.client_log import ClientLine, ClientLog
from motley.runs.folder import RunFolder
from motley.runs.metrics import ACCURACY, MetricsLog, Outcome, metric_of, outcome, scores_of
from motley.studies.results import read_saved
from motley.studies.sweep import IMMATERIAL, REFERENCE_METHOD
from motley.tasks import MetricInfo

#: Series are labelled by the settings in which they differ, if these are at most this many.
#: Otherwise folder names are easier to read.
MAX_SETTINGS_IN_LABEL = 2
#: Longer values (a file's path, a list) are not put into labels.
MAX_VALUE_LENGTH_IN_LABEL = 24
#: The value shown for a setting that a run does not have.
ABSENT = "-"


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder."""

    path: Path
    config: Config
    lines: list[dict[str, Any]]
    #: Versions and hardware; empty if the file is missing or damaged.
    environment: dict[str, Any]
    #: A sentence about users' own code that is not here; empty if nothing is missing.
    missing_code: str = ""
    #: The last scores of clients; None if the run has none.
    client_scores: ClientLine | None = None

    @classmethod
    def read(cls, path: Path) -> Run:
        """Return the run in a folder."""
        folder = RunFolder.open(path)
        config, missing_code = folder.read_config_for_display()
        return cls(
            path,
            config=config,
            lines=MetricsLog(folder.metrics).read(),
            environment=read_json_object(folder.environment),
            missing_code=missing_code,
            client_scores=ClientLog(folder.client_scores).last(),
        )

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The metrics of the rounds that were evaluated."""
        return [line for line in self.lines if scores_of(line)]

    @property
    def metric(self) -> MetricInfo:
        """The primary metric of the run."""
        return metric_of(self.lines)

    @property
    def rounds_done(self) -> int:
        """The number of the last finished round."""
        return self.lines[-1]["round"] if self.lines else 0

    def outcome(self, targets: tuple[float, ...]) -> Outcome:
        """Return the summary of the run's metrics."""
        return outcome(self.lines, self.config.evaluation.last_k, targets)


@dataclass
class Series:
    """Runs that differ only in their seeds."""

    label: str
    runs: list[Run] = field(default_factory=list)
    #: The score that this series shows: "mean" (over sizes), or one size if a study says so.
    headline: str = "mean"

    @property
    def is_reference(self) -> bool:
        """Whether it is local training alone, which other series should exceed."""
        return all(run.config.method.name == REFERENCE_METHOD for run in self.runs)

    @property
    def by_seed(self) -> dict[int, list[Run]]:
        """Seed -> its runs. Repeated runs of a seed are not independent, so they count once."""
        groups: dict[int, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.config.seed, []).append(run)
        return groups

    @property
    def count(self) -> str:
        """The number of seeds, and of runs if it differs: "3 seeds", "1 seed, 2 runs"."""
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
                repeated = f"{names} are {len(runs)} runs with the same settings and seed ({seed})"
                sentences.append(f"{self.label}: {repeated}. They count once, with their mean.")
        return sentences

    def key(self, size: str) -> str:
        """Return a key of a line's scores. "mean" is replaced by this series' headline."""
        return self.headline if size == "mean" else size

    def has_scores(self, size: str) -> bool:
        """Return whether any run has a score of this size."""
        key = self.key(size)
        lines = chain.from_iterable(run.evaluated for run in self.runs)
        return any(key in scores_of(line) for line in lines)

    def curve(self, size: str) -> tuple[list[int], list[list[float]]]:
        """Return the rounds that all runs have evaluated, and their scores; accuracies in percent.

        For each round there is one score per seed, the mean over the runs of that seed.
        """
        key = self.key(size)
        curves_by_seed: list[list[dict[int, float]]] = []  # per seed and run: round -> score
        common_rounds: set[int] | None = None
        for runs in self.by_seed.values():
            curves = []
            for run in runs:
                curve = {}
                for line in run.evaluated:
                    scores = scores_of(line)
                    if key in scores:
                        curve[line["round"]] = run.metric.scaled(scores[key])
                curves.append(curve)
                common_rounds = set(curve) if common_rounds is None else common_rounds & set(curve)
            curves_by_seed.append(curves)
        rounds = sorted(common_rounds or ())
        values = []
        for number in rounds:
            means = []
            for curves in curves_by_seed:
                means.append(fmean(curve[number] for curve in curves))
            values.append(means)
        return rounds, values


@dataclass
class Panel:
    """Series that are compared with each other."""

    title: str
    series: dict[str, Series] = field(default_factory=dict)

    def add(self, label: str, run: Run, headline: str = "mean") -> None:
        """Add a run to a series, unless it is there already: the same folder may be given twice."""
        series = self.series.setdefault(label, Series(label, headline=headline))
        if all(run.path.resolve() != other.path.resolve() for other in series.runs):
            series.runs.append(run)

    @property
    def distinct(self) -> dict[str, Series]:
        """The series with distinct runs.

        In a study, several series can show different sizes of the same runs. Only the first of
        them is included.
        """
        series_by_folders: dict[frozenset[Path], Series] = {}
        for series in self.series.values():
            folders = frozenset(run.path.resolve() for run in series.runs)
            series_by_folders.setdefault(folders, series)
        return {series.label: series for series in series_by_folders.values()}

    @property
    def sizes(self) -> list[str]:
        """All keys of scores: "mean" first, then every size in the order of evaluation."""
        names = {"mean": None}
        for run in self.runs():
            if run.evaluated:
                names |= dict.fromkeys(scores_of(run.evaluated[0]))
            else:
                names |= dict.fromkeys(run.config.model.sizes)
        return list(names)

    @property
    def metric(self) -> MetricInfo:
        """The primary metric: runs of one data set have one, unless `task.metrics` differs."""
        metrics = {run.metric: None for run in self.runs() if run.evaluated}
        if len(metrics) <= 1:
            return next(iter(metrics), ACCURACY)
        return MetricInfo(" or ".join(metric.name for metric in metrics))

    def runs(self) -> Iterator[Run]:
        """Yield every run."""
        for series in self.series.values():
            yield from series.runs


@dataclass
class ReportData:
    """Everything that a report shows."""

    studies: list[dict[str, Any]] = field(default_factory=list)
    panels: dict[str, Panel] = field(default_factory=dict)
    #: A table of the settings in which runs differ: one row per setting, one column per series.
    differences: list[list[str]] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The labels of all series, without repetitions."""
        labels: dict[str, None] = {}
        for panel in self.panels.values():
            labels |= dict.fromkeys(panel.series)
        return list(labels)

    @property
    def references(self) -> set[str]:
        """The labels of the series that are drawn as references."""
        labels: set[str] = set()
        for panel in self.panels.values():
            labels.update(series.label for series in panel.series.values() if series.is_reference)
        return labels

    @property
    def runs(self) -> list[Run]:
        """All runs, without repetitions."""
        runs: dict[Path, Run] = {}
        for panel in self.panels.values():
            for run in panel.runs():
                runs[run.path.resolve()] = run
        return list(runs.values())


def gather(paths: Iterable[Path]) -> ReportData:
    """Return the data of a report on the runs and studies in some folders."""
    data = ReportData()
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
        # Two studies, or two scales of one study, can have columns of the same name. The prefix
        # keeps their runs apart.
        prefix = f"{path.resolve().name}: " if len(studies) > 1 else ""
        _add_study(data, path, saved, prefix)
    _add_runs(data, runs)
    return data


def _add_study(data: ReportData, folder: Path, saved: dict[str, Any], prefix: str) -> None:
    data.studies.append(saved)
    for cell in saved["cells"]:
        for path in cell["runs"].values():
            if (folder / path / "config.toml").exists():
                panel = _panel(data, prefix + cell["column"])
                panel.add(cell["method"], Run.read(folder / path), cell.get("shows", "mean"))


def _panel(data: ReportData, title: str) -> Panel:
    return data.panels.setdefault(title, Panel(title))


@dataclass
class _Group:
    """Runs with the same settings except the seed."""

    panel: str
    settings: dict[str, Any]
    runs: list[Run]

    @property
    def method(self) -> str:
        return self.runs[0].config.method_label


def _add_runs(data: ReportData, runs: Sequence[Run]) -> None:
    groups = _group_by_settings(runs)
    differing = _differing_settings(groups)
    labels = _labels(groups, differing)
    for group, label in zip(groups, labels, strict=True):
        for run in group.runs:
            _panel(data, group.panel).add(label, run)
    if len(groups) > 1 and differing:
        data.differences.append(["", *labels])
        for key in differing:
            values = [_as_text(group.settings.get(key, ABSENT)) for group in groups]
            data.differences.append([key, *values])


def _group_by_settings(runs: Sequence[Run]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for run in runs:
        config = run.config.model_dump(mode="json", exclude={**IMMATERIAL, "seed": True})
        settings = dict(_flat(config))
        key = json.dumps(settings, sort_keys=True)
        group = groups.setdefault(key, _Group(_panel_title(run.config), settings, []))
        group.runs.append(run)
    return list(groups.values())


def _panel_title(config: Config) -> str:
    """Return the data set and its partition: runs on the same data are compared in one panel."""
    partition = config.data.partition
    alpha = getattr(partition, "alpha", None)
    parameter = f" {alpha:g}" if alpha is not None else ""
    return f"{config.data.name}, {partition.name}{parameter}"


def _differing_settings(groups: Sequence[_Group]) -> list[str]:
    """Return the settings in which groups differ."""
    keys: dict[str, None] = {}
    for group in groups:
        keys |= dict.fromkeys(group.settings)
    differing = []
    for key in keys:
        # Settings of the data are part of the panel's title. They count only within a panel.
        per_panel = key.startswith("data.")
        values: dict[str, set[str]] = {}
        for group in groups:
            panel = group.panel if per_panel else ""
            values.setdefault(panel, set()).add(json.dumps(group.settings.get(key)))
        if any(len(values_in_panel) > 1 for values_in_panel in values.values()):
            differing.append(key)
    return differing


def _labels(groups: Sequence[_Group], differing: Sequence[str]) -> list[str]:
    """Return one label per group: the method and the settings that differ.

    If such labels would be long, or the same for two groups of a panel, folder names are used.
    """
    keys = []
    for key in differing:
        # Settings that only one method has follow from the method's name.
        in_all_groups = all(key in group.settings for group in groups)
        if in_all_groups and not key.startswith(("method.name", "server.inco")):
            keys.append(key)
    labels = []
    is_short = len(keys) <= MAX_SETTINGS_IN_LABEL
    for group in groups:
        parts = [group.method]
        for key in keys:
            value = _as_text(group.settings[key])
            parts.append(f"{key} = {value}")
            is_short = is_short and len(value) <= MAX_VALUE_LENGTH_IN_LABEL
        labels.append(", ".join(parts))
    distinct = {(group.panel, label) for group, label in zip(groups, labels, strict=True)}
    if is_short and len(distinct) == len(groups):
        return labels
    return _folder_names(groups)


def _folder_names(groups: Sequence[_Group]) -> list[str]:
    """Return distinct names for groups, with as much of the folders' paths as necessary."""
    names = []
    for group in groups:
        folders = [run.path.resolve().name for run in group.runs]
        others = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        names.append(folders[0] + others)
    counts = Counter(names)
    for number, group in enumerate(groups):
        if counts[names[number]] > 1:
            folder = group.runs[0].path.resolve()
            names[number] = f"{folder.parent.name}/{folder.name}"
    if len(set(names)) < len(names):
        names = [str(group.runs[0].path.resolve()) for group in groups]
    return names


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in ("", None) else str(value)


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested tables, with their values."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
