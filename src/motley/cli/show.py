"""`motley show`: what a run came to."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from motley.errors import MotleyError
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.metrics import OVERALL, MetricsLog, Outcome, outcome


def show(
    path: Path = typer.Argument(..., metavar="RUN", help="The run's folder."),
    fingerprint_only: bool = typer.Option(False, "--fingerprint", help="Print a hash of the final global state."),
) -> None:
    """Show a run's accuracy a size and overall, its communication and its time."""
    folder = RunFolder.open(path)
    if fingerprint_only:
        server = load_checkpoint(folder.checkpoints)
        if server is None:
            raise MotleyError(f"{path} has no checkpoint yet.")
        print(fingerprint(server.state))
        return
    print_outcome(Console(), folder)


def print_outcome(console: Console, folder: RunFolder) -> None:
    """Print the table of a run."""
    config = folder.read_config()
    lines = MetricsLog(folder.metrics).read()
    if not lines:
        console.print(f"{folder.path} has no finished round yet.", highlight=False, markup=False, soft_wrap=True)
        return
    found = outcome(lines, config.evaluation.last_k, config.evaluation.targets)
    title = f"{config.data.name}, {config.method.name}" + (
        f" + InCo ({config.method.inco.preset})" if config.method.inco.active else ""
    )
    preset = f"preset {config.preset}, " if config.preset else ""
    console.print(f"[bold]{title}[/] ({preset}split {config.split.name}, seed {config.seed})", highlight=False)
    console.print(f"round {found.rounds} of {config.training.rounds}", highlight=False)
    if found.accuracy:
        console.print(accuracy_table(found, config.evaluation.last_k))
    else:
        console.print("no round has been evaluated yet")
    for target, number in found.rounds_to.items():
        reached = f"first reached in round {number}" if number is not None else "not reached"
        console.print(f"{target:.1%} mean accuracy: {reached}", highlight=False)
    if "method" in lines[-1]:
        own = ", ".join(f"{name} {_written(value)}" for name, value in lines[-1]["method"].items())
        console.print(f"{config.method.name}, last round: {own}", highlight=False, markup=False, soft_wrap=True)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.seconds.items())
    total = sum(found.seconds.values())
    console.print(
        f"communication: {found.bytes_down / 1e6:,.1f} MB down, {found.bytes_up / 1e6:,.1f} MB up", highlight=False
    )
    if found.epsilon:
        model, upload = (found.epsilon[who] for who in ("model", "upload"))
        whom = f"{_epsilon(model)} towards who sees models, {_epsilon(upload)} towards who sees uploads"
        console.print(f"epsilon of a client: {whom} (delta {config.privacy.delta:g})", highlight=False, soft_wrap=True)
    console.print(f"time: {total:.1f} s, {total / found.rounds:.2f} s a round ({phases})", highlight=False)


def _written(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _epsilon(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f}"


def accuracy_table(found: Outcome, last_k: int) -> Table:
    """Return a row a size, and one for their mean."""
    table = Table("size", "last", "best", "best round", f"mean of last {last_k}")
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
