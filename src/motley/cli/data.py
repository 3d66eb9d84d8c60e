"""`motley data`: download data sets, check the user's own files, draw partitions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from motley.assembly import deal_examples
from motley.cli.commands import Command, Group
from motley.cli.terminal import Console
from motley.config import Config, load_config, parse_overrides
from motley.core.errors import MotleyError
from motley.data import PARTITIONS, Dataset, Partition
from motley.data.dataset import data_root
from motley.data.fetch import Report, fetch
from motley.data.files.reading import Reading, read_files
from motley.data.files.settings import FileSettings
from motley.data.files.summary import (
    class_counts,
    class_name,
    client_counts,
    fitting_models,
    training_clients,
    warnings_about,
)
from motley.data.natural import limit_clients
from motley.data.plot import draw_clients
from motley.data.sources import SOURCES
from motley.extras import require
from motley.files import output_file
from motley.models.inputs import describe_shape
from motley.settings import validate

data = typer.Typer(
    cls=Group,
    help="Download data sets, check your own files, and draw which client has which classes.",
    no_args_is_help=True,
    add_completion=False,
)

#: Columns or classes that are printed.
MAX_LINES = 40
FORMAT_NAMES = {
    "images": "a folder of images",
    "npz": "arrays (.npz)",
    "csv": "a table (CSV)",
    "parquet": "a table (Parquet)",
    "jsonl": "records (JSON lines)",
    "text": "plain text",
    "huggingface": "a data set of Hugging Face",
}

_NAMES = ", ".join(sorted(SOURCES))


@data.callback()
def _data() -> None:
    """Download data sets, check your own files, and draw which client has which classes."""


@data.command("fetch", cls=Command)
def fetch_command(
    name: str = typer.Argument(..., metavar="NAME", help=f"The data set: {_NAMES}."),
    to: Path | None = typer.Option(
        None, "--to", help="The data folder. Default: $MOTLEY_DATA if it is set, else the cache."
    ),
) -> None:
    """Download a data set's published files, verify their checksums and unpack archives.

    An interrupted download continues where it stopped. Without a network, the message says which
    files to put where; the same command then verifies and unpacks them.
    """
    root = (to or data_root()).expanduser().absolute()
    console = Console()
    with _progress(console) as report:
        folder = fetch(name, root, report)
    _say(console, f"{name}: in {folder}")
    if root != data_root().absolute():
        _say(console, f"Runs find it with data.root = {str(root)!r}, or MOTLEY_DATA={root}")


@data.command("check", cls=Command)
def check_command(
    path: Path = typer.Argument(..., metavar="PATH", help="Your file or folder."),
    target: str = typer.Option("", help="The column with the labels or numbers to predict."),
    client: str = typer.Option("", help="The column that names the client of each row."),
    test: str = typer.Option("", help="The test file or folder."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="A setting of [data.files]; repeatable."
    ),
) -> None:
    """Read your own file or folder and print its columns and examples as a run would see them.

    The exit status is 1 if it cannot be used; the message says where and why.
    """
    console = Console()
    overrides = _file_overrides(target, client, test, set_)
    settings = validate(FileSettings, _file_table(overrides), "data.files")
    try:
        reading = read_files(path, settings)
    except MotleyError as error:
        _say(console, f"cannot be used: {error}")
        raise typer.Exit(1) from None
    _print_reading(console, path, reading, settings)
    words = ["motley", "run", "--set", "data.name=files", "--set", f"data.path={path}"]
    if reading.client_names:
        overrides.append("data.partition.name=natural")
        clients = len(training_clients(reading.dataset))
        overrides.append(f"federation.clients={clients}")
    overrides += fitting_models(reading.dataset)
    for override in overrides:
        words += ["--set", override]
    _say(console, f"\nuse it: {shlex.join(words)}")


@data.command("plot", cls=Command)
def plot_command(
    path: Path | None = typer.Argument(
        None, metavar="[PATH]", help="Your file or folder, or the TOML file of a run."
    ),
    out: Path = typer.Option(..., "-o", "--out", help="The picture, a PNG file."),
    preset: str = typer.Option("", help="Draw the clients of a preset (motley list presets)."),
    target: str = typer.Option("", help="The column with the labels."),
    client: str = typer.Option("", help="The column that names the client of each row."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="A setting of the run; repeatable."
    ),
) -> None:
    """Draw how many examples of each class every client has.

    The clients are a run's: your file's natural clients if it has any, else the clients of
    data.partition.
    """
    require("matplotlib", "motley data plot")
    overrides = [*_file_overrides(target, client, "", []), *set_]
    is_config = path is not None and path.suffix == ".toml"
    is_data = path is not None and not is_config
    if is_data:
        overrides = ["data.name=files", f"data.path={path}", *overrides]
    config = load_config(path if is_config else None, preset=preset, overrides=overrides)
    with output_file(out) as file:
        dataset, names = _load(config)
        if is_data and names:
            config = _with_natural_clients(config, dataset, parse_overrides(overrides))
        partition = deal_examples(config, dataset).partition
        is_natural = config.data.partition.name == "natural" and len(partition) == len(names)
        client_names = names if is_natural else map(str, range(len(partition)))
        classes = [""]
        if dataset.task == "classification":
            classes = [class_name(dataset, number) for number in range(dataset.classes)]
        title = f"{path or config.preset or config.data.name}: {config.data.partition.name}"
        counts = _counts(partition, dataset)
        draw_clients(counts, classes, list(client_names), title, file)
    classes_note = f", {dataset.classes} classes" if len(classes) > 1 else ""
    _say(Console(), f"{out}: {len(partition)} clients{classes_note}")


def _load(config: Config) -> tuple[Dataset, tuple[str, ...]]:
    """Return a configuration's data set, and the names of natural clients with training data."""
    if config.data.files is None or config.data.file_path is None:
        return config.data.load(), ()
    reading = read_files(config.data.file_path, config.data.files)
    dataset = limit_clients(reading.dataset, config.data.max_clients, config.data.max_per_client)
    numbers = training_clients(dataset)
    return dataset, tuple(reading.client_names[number] for number in numbers)


def _with_natural_clients(config: Config, dataset: Dataset, chosen: dict[str, Any]) -> Config:
    """Return the configuration with all natural clients, unless the user chose other ones."""
    if "partition" in chosen.get("data", {}) or "clients" in chosen.get("federation", {}):
        return config
    clients = len(training_clients(dataset))
    federation = config.federation.model_copy(update={"clients": clients})
    natural = config.data.model_copy(update={"partition": PARTITIONS["natural"]()})
    return config.model_copy(update={"data": natural, "federation": federation})


def _counts(partition: Partition, dataset: Dataset) -> np.ndarray:
    """Return the examples per client and class, or per client if there are no classes."""
    if dataset.task == "classification":
        return partition.label_counts(dataset.train.targets, dataset.classes)
    return partition.sizes[:, np.newaxis]


def _file_overrides(target: str, client: str, test: str, settings: list[str]) -> list[str]:
    """Return the options about files as overrides of a run."""
    given = {"target": target, "client": client, "test": test}
    named = [f"{key}={value}" for key, value in given.items() if value]
    return [f"data.files.{setting}" for setting in (*named, *settings)]


def _file_table(overrides: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = parse_overrides(overrides).get("data", {}).get("files", {})
    return table


def _print_reading(console: Console, path: Path, reading: Reading, settings: FileSettings) -> None:
    dataset = reading.dataset
    _say(console, f"{path}: {FORMAT_NAMES[reading.format]}")
    split = ""
    if reading.held_out:
        if reading.client_names:
            group = "client"
        else:
            group = "class" if dataset.task == "classification" else "part"
        split = f" ({settings.test_fraction:.0%} of every {group} are held out)"
    train_count, test_count = len(dataset.train), len(dataset.test)
    rows = {
        "examples": f"{train_count:,} for training, {test_count:,} for testing{split}",
        "inputs": describe_shape(dataset.shape),
        "task": dataset.task,
    }
    if dataset.task == "regression":
        targets = dataset.train.targets
        rows["targets"] = f"{dataset.classes} per example, {targets.min():g} to {targets.max():g}"
    counts = client_counts(dataset)
    if counts is not None:
        sizes = counts[0][counts[0] > 0]
        rows["clients"] = (
            f"{len(sizes):,}, with {sizes.min():,} to {sizes.max():,} training examples "
            f"(median {np.median(sizes):g})"
        )
    else:
        rows["clients"] = "none named; data.partition deals the examples"
    for name, text in rows.items():
        _say(console, f"{name:<10}{text}")
    _print_columns(console, reading)
    if dataset.task == "classification":
        _print_classes(console, dataset)
    remarks = warnings_about(reading)
    if remarks:
        _say(console, "\nnote:")
        for remark in remarks:
            _say(console, f"  {remark}")


def _print_columns(console: Console, reading: Reading) -> None:
    if not reading.columns:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("column", "role", "values", "missing"):
        table.add_column(heading)
    for column in reading.columns[:MAX_LINES]:
        missing = f"{column.missing:,}" if column.missing else ""
        table.add_row(*map(Text, (column.name, column.role, column.values, missing)))
    console.print()
    console.print(table)
    if len(reading.columns) > MAX_LINES:
        _say(console, f"... and {len(reading.columns) - MAX_LINES:,} more columns")


def _print_classes(console: Console, dataset: Dataset) -> None:
    train, test = class_counts(dataset)
    table = Table(box=None, pad_edge=False)
    table.add_column("class")
    table.add_column("training", justify="right")
    table.add_column("testing", justify="right")
    for number in range(min(dataset.classes, MAX_LINES)):
        name = class_name(dataset, number)
        table.add_row(name, f"{train[number]:,}", f"{test[number]:,}")
    console.print()
    console.print(table)
    if dataset.classes > MAX_LINES:
        _say(console, f"... and {dataset.classes - MAX_LINES:,} more classes")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    """Show a bar per file in a terminal, and one line per file elsewhere."""
    if not console.is_terminal:
        started: set[str] = set()

        def say_once(task: str, done: int, total: int | None) -> None:
            if task not in started:
                started.add(task)
                size = f", {total:,} bytes" if total else ""
                resumed = f", continued after {done:,}" if total and done else ""
                _say(console, task + size + resumed)

        yield say_once
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar_of: dict[str, TaskID] = {}

        def update(task: str, done: int, total: int | None) -> None:
            if task not in bar_of:
                bar_of[task] = bars.add_task(task, total=total)
            bars.update(bar_of[task], completed=done, total=total)

        yield update
