"""`motley list`: what a configuration can choose from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import typer
from rich.console import Console
from rich.table import Table

from motley.analysis import ANALYSES
from motley.config import presets
from motley.data import DATASETS, PARTITIONS
from motley.methods import METHODS
from motley.methods.names import ABLATIONS, PREFIXES, STEMS, SYSTEMS, VARIANTS
from motley.models import MODELS
from motley.registry import Registry
from motley.splits import SPLITS


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    presets = "presets"
    splits = "splits"
    analyses = "analyses"


_REGISTRIES: dict[Kind, Registry] = {
    Kind.methods: METHODS,
    Kind.models: MODELS,
    Kind.datasets: DATASETS,
    Kind.partitions: PARTITIONS,
    Kind.splits: SPLITS,
    Kind.analyses: ANALYSES,
}


def list_things(kind: Kind = typer.Argument(..., help="What to list.")) -> None:
    """List methods, models, datasets, partitions, presets, splits or analyses."""
    table = Table(box=None, pad_edge=False)
    if kind is Kind.presets:
        table.add_column("preset", style="bold", no_wrap=True)
        table.add_column("what it is")
        for name, summary in presets().items():
            table.add_row(name, summary)
    else:
        table.add_column(_REGISTRIES[kind].kind.replace(" ", ""), style="bold", no_wrap=True)
        table.add_column("what it is")
        table.add_column("paper")
        for entry in sorted(_REGISTRIES[kind], key=lambda entry: by_name(entry.name)):
            also = f" (also: {', '.join(entry.aliases)})" if entry.aliases else ""
            table.add_row(entry.name, entry.summary + also, entry.paper)
    Console().print(table)
    if kind is Kind.methods:
        Console().print(_names())


def by_name(name: str) -> list[str | int]:
    """Return what names are sorted by: letters, and the numbers in them as numbers, so that vgg9 is before vgg11."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _names() -> Table:
    """Return the papers' names, by beginnings and ends."""
    table = Table(box=None, pad_edge=False, title="\nNames for a method with a split and InCo", title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("stands for")
    table.add_column("what it is")
    for prefix, (summary, settings) in PREFIXES.items():
        table.add_row(f"{prefix}*", _written({k: v for k, v in settings.items() if v is not True}), summary)
    for ablation, settings in ABLATIONS.items():
        table.add_row(f"InCo* {ablation}", _written(settings), "an ablation of the InCo paper")
    for name, (summary, settings) in SYSTEMS.items():
        table.add_row(name, _written(settings), summary)
    for stem, settings in STEMS.items():
        table.add_row(f"*{stem}", _written(settings), f"Fed{stem}, Hetero{stem} or InCo{stem}")
    for name, (summary, settings) in VARIANTS.items():
        table.add_row(name, _written({k: v for k, v in settings.items() if k != "method.inco.preset"}), summary)
    return table


def _written(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key} = {str(value).lower()}" for key, value in settings.items())
