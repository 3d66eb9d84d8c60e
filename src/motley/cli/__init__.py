"""The command line: one file per command."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

import motley
from motley.cli import failures
from motley.cli.commands import Group, LazyCommand
from motley.core.errors import MotleyError

#: All commands, in the order of the help. A summary repeats the first paragraph of the function's
#: docstring, so that `motley --help` need not import the function.
COMMANDS = (
    LazyCommand(
        "run",
        "Train a federation from one TOML file, a preset, or the defaults.",
        "motley.cli.run:run",
    ),
    LazyCommand(
        "config",
        "Print all settings of a run, with their documentation and where each value comes from.",
        "motley.cli.config:config",
    ),
    LazyCommand(
        "resume",
        "Continue a run after a crash, Ctrl-C or kill -9, or extend it with --rounds.",
        "motley.cli.resume:resume",
    ),
    LazyCommand(
        "show",
        "Show the score per size and overall, the communication and the time of runs.",
        "motley.cli.show:show",
    ),
    LazyCommand(
        "list",
        "List the names a configuration can use, all settings, or the runs in a folder.",
        "motley.cli.list:list_things",
    ),
    LazyCommand(
        "data",
        "Download data sets, check your own files, and draw which client has which classes.",
        "motley.cli.data:data",
    ),
    LazyCommand(
        "model",
        "Check models: your own, or Motley's.",
        "motley.cli.model:model",
    ),
    LazyCommand(
        "bench",
        "Measure milliseconds per round and per client step, memory, and where the time goes.",
        "motley.cli.bench:bench",
    ),
    LazyCommand(
        "study",
        "Compare methods over data sets and seeds: the demo, a paper's table or your own file.",
        "motley.cli.study:study",
    ),
    LazyCommand(
        "report",
        "Write one self-contained HTML page: curves, tables, traffic, partition, configurations.",
        "motley.cli.report:report",
    ),
    LazyCommand(
        "plan",
        "Print the cost of every size, or with --budgets the largest size for every client.",
        "motley.cli.plan:plan",
    ),
    LazyCommand(
        "analyze",
        "Analyse runs: a picture (PNG and SVG) and its numbers (CSV and JSON).",
        "motley.cli.analyze:analyze",
    ),
    LazyCommand(
        "export",
        "Export the trained model of a size, with a model card, and measure the written file.",
        "motley.cli.export:export",
    ),
    LazyCommand(
        "predict",
        "Predict classes or values for images, arrays or rows of a table.",
        "motley.cli.predict:predict",
    ),
    LazyCommand(
        "watch",
        "Serve a run's report on this machine, live while the run goes on, until Ctrl-C.",
        "motley.cli.watch:watch",
    ),
    LazyCommand(
        "deploy",
        "Run a federation on several machines, with Flower.",
        "motley.cli.deploy:deploy",
    ),
)


class _AllCommands(Group):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in COMMANDS:
            self.add_command(command)


app = typer.Typer(
    cls=_AllCommands,
    help="Federated learning for a motley crew of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    show_version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """Federated learning for a motley crew of devices."""
    if show_version:
        print(motley.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and exit. No exception reaches the user as a traceback."""
    status: str | int | None = 0
    # As `engine.device.request_hardware_queues` does, which would import torch: a command must not
    # use the GPU before it is set, not even to print the GPU's name.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        app(prog_name="motley")
    except SystemExit as exit_request:
        status = exit_request.code
    except Exception as error:
        status = failures.handle(error)
    problem = failures.flush_output()
    if problem is not None and status == 0:
        status = failures.handle(MotleyError(f"the standard output cannot be written: {problem}."))
    sys.exit(status)
