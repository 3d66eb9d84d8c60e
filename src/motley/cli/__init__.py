"""The command line: one file per command."""

from __future__ import annotations

import sys

import typer

import motley
from motley.cli import failures
from motley.cli.analyze import analyze
from motley.cli.bench import bench
from motley.cli.commands import Command, Group
from motley.cli.deploy import deploy
from motley.cli.list import list_things
from motley.cli.plan import plan
from motley.cli.report import report
from motley.cli.resume import resume
from motley.cli.run import run
from motley.cli.show import show
from motley.cli.study import study
from motley.cli.watch import watch
from motley.core.errors import MotleyError

app = typer.Typer(
    cls=Group,
    help="Federated learning for a motley crew of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(resume)
app.command()(show)
app.command("list")(list_things)
app.command()(bench)
app.command()(study)
app.command()(report)
app.command()(plan)
app.command()(analyze)
app.command()(watch)
app.add_typer(deploy, name="deploy", cls=Group)
for registered in (*app.registered_commands, *deploy.registered_commands):
    registered.cls = Command


@app.callback(invoke_without_command=True)
def version(show_version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Federated learning for a motley crew of devices."""
    if show_version:
        print(motley.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and end the process with its exit status; no exception leaves it as a traceback."""
    status: str | int | None = 0
    try:
        app(prog_name="motley")
    except SystemExit as left:
        status = left.code
    except Exception as error:
        status = failures.handle(error)
    problem = failures.flush_output()
    if problem is not None and status == 0:
        status = failures.handle(MotleyError(f"the standard output cannot be written: {problem}."))
    sys.exit(status)
