"""`motley plan`: the cost of each size, and the largest size that fits each client."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich.table import Table

from motley.assembly import build_split, load_dataset_of
from motley.bench import SHAPES, synthetic_dataset
from motley.cli.code import import_beside
from motley.cli.terminal import Console
from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.data import Dataset
from motley.data.device import device_data
from motley.methods import METHODS
from motley.plan import NODE_RUNTIME, Budget, Cost, costs_of, largest_fitting, read_budgets

#: With more clients than this, only the sizes are printed, and how many clients have each.
MAX_ROWS = 1000
COLUMNS = ("parameters", "GFLOPs\nper step", "activ.\nMB", "memory\nMB", "MB per\nround")


def plan(
    file: Path | None = typer.Argument(None, help="A TOML file. Default: the quickstart preset."),
    budgets: Path | None = typer.Option(
        None, help="A CSV file with the columns client and any of memory_mb, parameters, gflops."
    ),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."
    ),
    synthetic: bool = typer.Option(
        False, help="Use random images instead of the data set's files."
    ),
) -> None:
    """Print the cost of every size, or with --budgets the largest size for every client."""
    import_beside(file)
    config = load_config(file, preset=preset, overrides=set_)
    # Before the costs, which take seconds.
    fleet = None if budgets is None else read_budgets(budgets)
    costs = costs_in(config, synthetic)
    console = Console()
    if fleet is None:
        console.print_numbers(_table_of_sizes(costs, config))
        return
    chosen = [largest_fitting(costs, budget) for budget in fleet]
    if len(fleet) <= MAX_ROWS:
        rows = [_row(budget, size, costs) for budget, size in zip(fleet, chosen, strict=True)]
        console.print_numbers(table(rows, config, "client"))
    else:
        console.print_numbers(_table_of_sizes(costs, config))
        _print_unfit(console, fleet, chosen)
    counts = Counter(size or "none" for size in chosen)
    console.print(", ".join(f"{size}: {counts[size]}" for size in (*costs, "none") if counts[size]))


def _table_of_sizes(costs: dict[str, Cost], config: Config) -> Table:
    return table([(size, size, cost) for size, cost in costs.items()], config, "size")


def _print_unfit(console: Console, fleet: list[Budget], chosen: list[str | None]) -> None:
    """Print the first clients that no size fits, if there are any."""
    unfit = [budget.client for budget, size in zip(fleet, chosen, strict=True) if size is None]
    if not unfit:
        return
    names = ", ".join(unfit[:10])
    if len(unfit) > 10:
        names += f" and {len(unfit) - 10:,} more"
    console.print(f"no size fits: {names}", highlight=False, markup=False, soft_wrap=True)


def _row(budget: Budget, size: str | None, costs: dict[str, Cost]) -> tuple[str, str, Cost | None]:
    return budget.client, size or "none fits", costs[size] if size else None


def costs_in(config: Config, synthetic: bool = False) -> dict[str, Cost]:
    """Return the costs of a configuration's sizes, the largest first."""
    dataset = synthetic_dataset(config.data.name) if synthetic else _dataset_of(config)
    dataset.check_inferred_classes()
    examples = device_data(dataset.train, config.data.transform, torch.device("cpu"), augment=False)
    split = build_split(config, examples.shape, dataset.classes)
    costs = costs_of(split, examples.shape, config.training, config.uplink.dtype)
    if METHODS[config.method.name].requirements.exchanges_weights:
        return costs
    # Weights travel once, before the first round.
    return {size: replace(cost, traffic=0) for size, cost in costs.items()}


def _dataset_of(config: Config) -> Dataset:
    """Load the configuration's data set. If it is missing, the error says how to do without it."""
    try:
        return load_dataset_of(config)
    except MotleyError as error:
        if config.data.name not in SHAPES:
            raise
        raise MotleyError(
            f"{error}\nA plan only needs the shape of the images: --synthetic uses random "
            "images of that shape instead of the files."
        ) from None


def table(rows: list[tuple[str, str, Cost | None]], config: Config, first: str) -> Table:
    """Return one row per client or, if `first` is "size", per size."""
    caption = (
        f"activations and memory of a training step with a batch of {config.training.batch_size}\n"
        f"a node's process takes about {NODE_RUNTIME / 1e6:.0f} MB more than `import torch`"
    )
    result = Table(caption=caption, caption_justify="left")
    names_clients = first != "size"
    result.add_column(first, overflow="fold")
    if names_clients:
        result.add_column("size", overflow="fold")
    # Short two-line headers and no_wrap: rich must never truncate a number.
    for header in COLUMNS:
        result.add_column(header, justify="right", no_wrap=True)
    for name, size, cost in rows:
        numbers = ("",) * len(COLUMNS) if cost is None else _numbers(cost)
        names = (name, size) if names_clients else (name,)
        result.add_row(*names, *numbers)
    return result


def _numbers(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.parameters:,}",
        f"{cost.flops / 1e9:,.3g}",
        f"{cost.activations / 1e6:,.1f}",
        f"{cost.memory / 1e6:,.1f}",
        f"{cost.traffic / 1e6:,.2f}",
    )
