"""`motley plan`: what each size costs, and which one each client of a fleet can hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

from motley.bench import stand_in
from motley.config import Config, load_config
from motley.data import load_dataset
from motley.data.device import DeviceData
from motley.federation import build_split
from motley.plan import Budget, Cost, costs_of, largest_fitting, read_budgets


def plan(
    file: Path | None = typer.Argument(None, help="A TOML file; without one, the quickstart preset."),
    budgets: Path | None = typer.Option(None, help="A CSV file: client, and any of memory_mb, parameters, gflops."),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option([], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."),
    synthetic: bool = typer.Option(False, help="Random images in place of the data set's files."),
) -> None:
    """Print what every size takes, or with --budgets the largest size for every client."""
    config = load_config(file, preset=preset, overrides=set_)
    costs = costs_in(config, synthetic)
    console = Console()
    if budgets is None:
        console.print(table([(size, size, cost) for size, cost in costs.items()], config, "size"))
        return
    fleet = read_budgets(budgets)
    chosen = {budget.client: largest_fitting(costs, budget) for budget in fleet}
    console.print(table([_row(budget, chosen[budget.client], costs) for budget in fleet], config, "client"))
    counts = Counter(size or "none" for size in chosen.values())
    console.print(", ".join(f"{size}: {counts[size]}" for size in (*costs, "none") if counts[size]))


def _row(budget: Budget, size: str | None, costs: dict[str, Cost]) -> tuple[str, str, Cost | None]:
    return budget.client, size or "none fits", costs[size] if size else None


def costs_in(config: Config, synthetic: bool = False) -> dict[str, Cost]:
    """Return the costs of a configuration's sizes, the largest first."""
    data = config.data
    known = stand_in(data.name) if synthetic else load_dataset(data.name, root=data.root_path, path=data.file_path)
    examples = DeviceData(known.train, data.transform, torch.device("cpu"), augment=False)
    split = build_split(config, examples, known.classes)
    return costs_of(split, examples.shape, config.training, config.transit.upload)


def table(rows: list[tuple[str, str, Cost | None]], config: Config, first: str) -> Table:
    """Return a row a client, or a size."""
    activations = f"activations MB (batch {config.training.batch_size})"
    columns = ("parameters", "GFLOPs a step", activations, "memory MB", "MB a round")
    result = Table(*([first] if first == "size" else [first, "size"]), *columns)
    for name, size, cost in rows:
        numbers = ("",) * len(columns) if cost is None else _numbers(cost)
        result.add_row(*([name] if first == "size" else [name, size]), *numbers)
    return result


def _numbers(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.parameters:,}",
        f"{cost.flops / 1e9:,.3g}",
        f"{cost.activations / 1e6:,.1f}",
        f"{cost.memory / 1e6:,.1f}",
        f"{cost.traffic / 1e6:,.2f}",
    )
