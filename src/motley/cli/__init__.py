"""The command line: one file a command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

import motley
from motley.cli.analyze import analyze
from motley.cli.bench import bench
from motley.cli.deploy import deploy
from motley.cli.list import list_things
from motley.cli.plan import plan
from motley.cli.report import report
from motley.cli.resume import resume
from motley.cli.run import run
from motley.cli.show import show
from motley.cli.study import study
from motley.cli.watch import watch
from motley.errors import MotleyError

app = typer.Typer(
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
app.add_typer(deploy, name="deploy")


@app.callback(invoke_without_command=True)
def version(show_version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Federated learning for a motley crew of devices."""
    if show_version:
        print(motley.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a problem the user can solve is one message, not a traceback."""
    try:
        app(prog_name="motley")
    except MotleyError as error:
        message = Text.assemble(("motley:", "bold red"), " ", str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)
