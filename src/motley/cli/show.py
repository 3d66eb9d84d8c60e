"""`motley show`: the results of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motley.config import Config
from motley.core.errors import MotleyError
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.metrics import OVERALL, MetricsLog, Outcome, outcome


def show(
    paths: list[Path] = typer.Argument(..., metavar="RUN...", help="Folders of runs; several are shown side by side."),
    fingerprint_only: bool = typer.Option(False, "--fingerprint", help="Print a hash of the final global state."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list with one object per run."),
) -> None:
    """Show the accuracy per size and overall, the communication and the time of runs."""
    if fingerprint_only and as_json:
        raise MotleyError("--fingerprint and --json: give one of them; --json includes the fingerprint.")
    folders = [RunFolder.open(path) for path in paths]
    if fingerprint_only:
        for folder in folders:
            mark = _fingerprint(folder)
            if mark is None:
                raise MotleyError(f"{folder.path} has no checkpoint yet.")
            print(mark if len(folders) == 1 else f"{mark}  {folder.path}")
    elif as_json:
        print(json.dumps([as_plain(folder) for folder in folders], indent=2))
    elif len(folders) == 1:
        print_outcome(Console(), folders[0])
    else:
        Console().print(side_by_side(folders))


def _fingerprint(folder: RunFolder) -> str | None:
    server = load_checkpoint(folder.checkpoints)
    return fingerprint(server.state) if server is not None else None


def title(config: Config) -> str:
    """Return the data and the method of a run in a few words."""
    inco = f" + InCo ({config.method.inco.variant})" if config.method.inco.active else ""
    return f"{config.data.name}, {config.method.name}{inco}"


def print_outcome(console: Console, folder: RunFolder) -> None:
    """Print the table of a run."""
    config = folder.read_config()
    lines = MetricsLog(folder.metrics).read()
    if not lines:
        console.print(f"{folder.path} has no finished round yet.", highlight=False, markup=False, soft_wrap=True)
        return
    found = outcome(lines, config.evaluation.last_k, config.evaluation.targets)
    preset = f"preset {config.preset}, " if config.preset else ""
    about = f" ({preset}split {config.split.name}, seed {config.seed})"
    console.print(Text.assemble((title(config), "bold"), about))
    console.print(f"round {found.rounds} of {config.training.rounds}", highlight=False)
    if found.accuracy:
        console.print(accuracy_table(found))
    else:
        console.print("no round has been evaluated yet")
    for target, number in found.rounds_to.items():
        reached = f"first reached in round {number}" if number is not None else "not reached"
        console.print(f"{target:.1%} mean accuracy: {reached}", highlight=False)
    if lines[-1].get("method"):
        own = ", ".join(f"{name} {_written(value)}" for name, value in lines[-1]["method"].items())
        console.print(f"{config.method.name}, last round: {own}", highlight=False, markup=False, soft_wrap=True)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.seconds.items())
    total = sum(found.seconds.values())
    console.print(
        f"communication: {found.bytes_down / 1e6:,.1f} MB down, {found.bytes_up / 1e6:,.1f} MB up", highlight=False
    )
    if found.epsilon:
        model, upload = _epsilon(found.epsilon.get("model")), _epsilon(found.epsilon.get("upload"))
        whom = f"{model} (adversary sees the global models), {upload} (adversary sees individual updates)"
        console.print(f"client-level epsilon: {whom}, delta {config.privacy.delta:g}", highlight=False, soft_wrap=True)
    console.print(f"time: {total:.1f} s, {total / found.rounds:.2f} s per round ({phases})", highlight=False)


def _written(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _epsilon(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f}"


def accuracy_table(found: Outcome) -> Table:
    """Return one row per size, and one for their mean."""
    table = Table("size", "last", "best", "best round", f"mean of last {found.averaged}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, summary in found.accuracy.items():
        if name == OVERALL:
            table.add_section()
        table.add_row(
            name,
            f"{summary.last:.2%}",
            f"{summary.best:.2%}",
            str(summary.best_round),
            f"{summary.mean_of_last_k:.2%}",
            style="bold" if name == OVERALL else "",
        )
    return table


# ---- several runs


def side_by_side(folders: Sequence[RunFolder]) -> Table:
    """Return a table with one column per run: its settings in a few words, its accuracies, traffic and time."""
    plain = [as_plain(folder, with_fingerprint=False) for folder in folders]
    sizes: list[str] = []
    for run in plain:
        sizes += [size for size in run["accuracy"] if size not in sizes and size != OVERALL]
    table = Table("")
    for folder in folders:
        table.add_column(Text(str(folder.path)), justify="right", overflow="fold")
    for name in ("data", "method", "inco", "split", "preset", "seed"):
        values = [str(run[name] or "") for run in plain]
        if any(values):
            table.add_row(name, *values)
    table.add_row("round", *(f"{run['round']} of {run['rounds']}" for run in plain), end_section=True)
    for key, words in (("last", "last accuracy"), ("best", "best accuracy")):
        for size in (*sizes, OVERALL):
            row = [_percent(run["accuracy"].get(size, {}).get(key)) for run in plain]
            name = f"{words}, {size}"
            table.add_row(name, *row, style="bold" if size == OVERALL else "", end_section=size == OVERALL)
    table.add_row("MB down", *(f"{run['bytes']['down'] / 1e6:,.1f}" for run in plain))
    table.add_row("MB up", *(f"{run['bytes']['up'] / 1e6:,.1f}" for run in plain))
    table.add_row("seconds", *(f"{sum(run['seconds'].values()):,.1f}" for run in plain))
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def as_plain(folder: RunFolder, *, with_fingerprint: bool = True) -> dict[str, Any]:
    """Return the results of a run as plain values, for JSON."""
    config = folder.read_config()
    lines = MetricsLog(folder.metrics).read()
    found = outcome(lines, config.evaluation.last_k, config.evaluation.targets)
    accuracy = {}
    for size, summary in found.accuracy.items():
        accuracy[size] = {
            "last": summary.last,
            "best": summary.best,
            "best_round": summary.best_round,
            "mean_of_last": summary.mean_of_last_k,
        }
    inco = config.method.inco
    plain: dict[str, Any] = {
        "run": str(folder.path),
        "data": config.data.name,
        "method": config.method.name,
        "inco": inco.variant if inco.active else None,
        "split": config.split.name,
        "preset": config.preset or None,
        "seed": config.seed,
        "round": found.rounds,
        "rounds": config.training.rounds,
        "finished": found.rounds >= config.training.rounds,
        "accuracy": accuracy,
        "mean_of_last_rounds": found.averaged,
        "rounds_to": {str(target): number for target, number in found.rounds_to.items()},
        "bytes": {"down": found.bytes_down, "up": found.bytes_up},
        "seconds": found.seconds,
        "epsilon": found.epsilon or None,
    }
    if with_fingerprint:
        plain["fingerprint"] = _fingerprint(folder)
    return plain
