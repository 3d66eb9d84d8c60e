"""`motley list`: the names a configuration can use, all settings, and the runs in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from motley.analysis import ANALYSES
from motley.cli.code import import_beside
from motley.cli.terminal import Console
from motley.config import presets
from motley.config.paper_names import ABLATIONS, PREFIXES, STEMS, SYSTEMS, VARIANTS
from motley.core.errors import MotleyError
from motley.core.registry import Registry
from motley.data import DATASETS, PARTITIONS
from motley.data.dataset import data_root
from motley.data.sources import SOURCES
from motley.methods import METHODS
from motley.models import MODELS
from motley.reference import Setting, describe, markdown, sections
from motley.runs.overview import find_runs
from motley.splits import SPLITS
from motley.tasks import LOSSES, METRICS, TASKS


class Kind(StrEnum):
    """The things that can be listed."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    presets = "presets"
    splits = "splits"
    analyses = "analyses"
    tasks = "tasks"
    losses = "losses"
    metrics = "metrics"
    settings = "settings"
    runs = "runs"


_KINDS = ", ".join(Kind)


def list_things(
    kind: Kind = typer.Argument(..., metavar="KIND", help=f"What to list: {_KINDS}."),
    which: str = typer.Argument(
        "",
        help="With runs: the folder to look in (default: runs/). With settings: part of a key. "
        "With analyses: the analysis whose settings to list.",
    ),
    as_markdown: bool = typer.Option(
        False, "--markdown", help="With settings: print the page docs/settings.md."
    ),
) -> None:
    """List the names a configuration can use, all settings, or the runs in a folder."""
    if which and kind not in (Kind.settings, Kind.runs, Kind.analyses):
        raise MotleyError(f"motley list {kind}: takes no second argument; {which!r} was given.")
    if as_markdown and (which or kind is not Kind.settings):
        raise MotleyError("--markdown: is for `motley list settings` without a second argument.")
    if kind is Kind.settings:
        _list_settings(which, as_markdown)
    elif kind is Kind.runs:
        _list_runs(Path(which or "runs"))
    elif kind is Kind.presets:
        _list_presets()
    elif kind is Kind.analyses and which:
        _list_analysis_settings(which)
    else:
        import_beside(None)
        _list_registry(_registry(kind), _dataset_states() if kind is Kind.datasets else {})
        if kind is Kind.methods:
            Console().print(_names())


def _registry(kind: Kind) -> Registry:
    registries: dict[Kind, Registry] = {
        Kind.methods: METHODS,
        Kind.models: MODELS,
        Kind.datasets: DATASETS,
        Kind.partitions: PARTITIONS,
        Kind.splits: SPLITS,
        Kind.analyses: ANALYSES,
        Kind.tasks: TASKS,
        Kind.losses: LOSSES,
        Kind.metrics: METRICS,
    }
    return registries[kind]


def _list_presets() -> None:
    table = _table("preset", "description")
    for name, summary in presets().items():
        table.add_row(name, summary)
    Console().print(table)


def _list_registry(registry: Registry, states: Mapping[str, str]) -> None:
    """Print one line per entry. `states`, by name, is a further column, if there are any."""
    entries = sorted(registry, key=lambda entry: by_name(entry.name))
    with_papers = any(entry.paper for entry in entries)
    headings = ["description"]
    if states:
        headings.append("files")
    if with_papers:
        headings.append("paper")
    table = _table(registry.kind.replace(" ", ""), *headings)
    for entry in entries:
        also = f" (also: {', '.join(entry.aliases)})" if entry.aliases else ""
        cells = [entry.summary + also]
        if states:
            cells.append(states.get(entry.name, ""))
        if with_papers:
            cells.append(entry.paper)
        table.add_row(entry.name, *cells)
    Console().print(table)
    _list_plugins(registry)


def _list_plugins(registry: Registry) -> None:
    """Print the plug-ins of installed packages, and why some of them cannot be used."""
    table = _table("plug-in", "path", "description")
    problems = []
    for plugin in registry.plugins():
        if isinstance(plugin, str):
            problems.append(plugin)
        else:
            table.add_row(plugin.name, plugin.path, plugin.summary)
    if table.row_count:
        Console().print()
        Console().print(table)
    for problem in problems:
        Console().print(problem, highlight=False, markup=False, soft_wrap=True)


def _dataset_states() -> dict[str, str]:
    """Return for each data set where its files are, or how to get them."""
    states = {"digits": "come with Motley", "npz": "yours: data.path", "files": "yours: data.path"}
    root = data_root()
    for name, source in SOURCES.items():
        folder = source.folder_in(root)
        states[name] = f"in {folder}" if folder else f"missing: motley data fetch {name}"
    return states


def _list_analysis_settings(name: str) -> None:
    """Print the settings of one analysis."""
    entry = ANALYSES.entry(name, "motley list analyses")
    console = Console()
    console.print(f"motley analyze {entry.name} RUN... [--set KEY=VALUE]", markup=False)
    console.print(entry.summary, markup=False, highlight=False)
    fields = entry.item.settings_class.model_fields
    if not fields:
        console.print("It has no settings.")
        return
    table = _table("key", "default", "description")
    for key, field in fields.items():
        setting = describe("", key, field)
        allowed = f" Allowed: {setting.allowed}." if setting.allowed else ""
        table.add_row(key, Text(setting.default), Text(setting.description + allowed))
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, style="bold", no_wrap=True)
    for name in others:
        table.add_column(name)
    return table


def by_name(name: str) -> list[str | int]:
    """Return a sort key that compares numbers by value, so that vgg9 comes before vgg11."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# ---- settings


def _list_settings(which: str, as_markdown: bool) -> None:
    if as_markdown:
        print(markdown(), end="")
        return
    console = Console()
    any_match = False
    for section in sections():
        settings = [setting for setting in section.settings if which in setting.key]
        note = section.description if not section.settings and not which else ""
        if not settings and not note:
            continue
        any_match = True
        console.print(Text(section.title, "bold"))
        if note:
            console.print(note, highlight=False, markup=False)
        for setting in settings:
            console.print(_described(setting), soft_wrap=not console.is_terminal)
        console.print()
    if not any_match:
        raise MotleyError(f"motley list settings: no key contains {which!r}.")


def _described(setting: Setting) -> Text:
    """Return two lines: a key with its default, type and allowed values; and its description."""
    default = f" = {setting.default}" if setting.default else " (required)"
    allowed = f": {setting.allowed}" if setting.allowed else ""
    return Text.assemble(
        "  ",
        (setting.key, "cyan"),
        default,
        (f"  ({setting.type}{allowed})", "dim"),
        f"\n      {setting.description}",
    )


# ---- runs


def _list_runs(folder: Path) -> None:
    if not folder.is_dir():
        raise MotleyError(
            f"{folder}: there is no such folder. motley list runs FOLDER looks in another one."
        )
    runs = find_runs(folder)
    if not runs:
        message = f"There are no runs in {folder}."
        Console().print(message, highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", style="bold", overflow="fold", min_width=10)
    for name in ("data", "method", "preset"):
        table.add_column(name, overflow="fold")
    for name in ("round", "last", "best"):
        table.add_column(name, no_wrap=True)
    table.add_column("began", min_width=10)
    table.add_column("state", overflow="fold", min_width=8)
    for run in runs:
        cells = (
            run.path,
            run.data,
            run.method,
            run.preset,
            run.round,
            run.last,
            run.best,
            run.began,
            run.state,
        )
        table.add_row(*map(str, cells))
    Console().print_list(table)


# ---- methods' names


def _names() -> Table:
    """Return a table of the papers' names: prefixes, ablations, suffixes and variants."""
    table = Table(
        box=None,
        pad_edge=False,
        title="\nNames for a method with a split and InCo",
        title_justify="left",
    )
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("stands for")
    table.add_column("description")
    for prefix, (summary, settings) in PREFIXES.items():
        shown = {key: value for key, value in settings.items() if value is not True}
        table.add_row(f"{prefix}*", _written(shown), summary)
    for ablation, settings in ABLATIONS.items():
        table.add_row(f"InCo* {ablation}", _written(settings), "an ablation of the InCo paper")
    for name, (summary, settings) in SYSTEMS.items():
        table.add_row(name, _written(settings), summary)
    for stem, settings in STEMS.items():
        table.add_row(f"*{stem}", _written(settings), f"Fed{stem}, Hetero{stem} or InCo{stem}")
    for name, (summary, settings) in VARIANTS.items():
        shown = {key: value for key, value in settings.items() if key != "server.inco.variant"}
        table.add_row(name, _written(shown), summary)
    return table


def _written(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in settings.items())
