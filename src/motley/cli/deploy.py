"""`motley deploy`: run a federation on several machines, with Flower."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from motley.cli.commands import Command, Group
from motley.extras import require

deploy = typer.Typer(
    cls=Group,
    help="Run a federation on several machines, with Flower.",
    no_args_is_help=True,
    add_completion=False,
)

FOLDER = typer.Argument(..., metavar="DIR", help="The folder that `motley deploy init` created.")


def simulation() -> Callable[..., Any]:
    """Return the function that runs a federation on Flower's simulation engine."""
    # Ask for Ray first: its extra includes Flower, so one command installs both.
    require("ray", "engine.name = 'flower-simulation'")
    require("flwr", "engine.name = 'flower-simulation'")
    from motley.flower.simulation import simulate

    return simulate


@deploy.command(cls=Command)
def init(
    path: Path = typer.Argument(..., metavar="DIR", help="A new folder."),
    file: Path | None = typer.Option(
        None, "--config", help="A TOML file. Default: the quickstart preset."
    ),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."
    ),
    host: str = typer.Option(
        "127.0.0.1", help="The server's host name or address, as nodes see it."
    ),
    port: int = typer.Option(8443, help="The server's port."),
    insecure: bool = typer.Option(
        False, "--insecure", help="No encryption and no keys; only for tests on one machine."
    ),
) -> None:
    """Write a folder with the run's configuration, certificates, keys, and one folder per node."""
    require("flwr", "motley deploy")
    from motley.cli.code import import_beside
    from motley.config import load_config
    from motley.deploy.folder import DeploySettings, create
    from motley.settings import validate

    import_beside(file)
    settings = validate(DeploySettings, {"host": host, "port": port, "insecure": insecure})
    # Nodes may be away. A round with fewer than half of its updates is repeated, unless --set says
    # otherwise.
    overrides = ["server.min_fraction=0.5", *set_, "engine.name=flower"]
    config = load_config(file, preset=preset, overrides=overrides)
    folder = create(path, config, settings)
    nodes = sorted(folder.nodes.iterdir(), key=lambda node: int(node.name.removeprefix("node-")))
    print(f"{len(nodes)} nodes, server at {settings.address}\n")
    print(f"on the server:     motley deploy server {path}")
    for node in nodes:
        number = node.name.removeprefix("node-")
        print(f"on node {number:>3}:       motley deploy node {path}/nodes/{node.name}")
    print(f"then, to run it:   motley deploy run {path}")
    print(f"to see its state:  motley deploy status {path}")


@deploy.command(cls=Command)
def server(path: Path = FOLDER) -> None:
    """Start the server, which admits nodes whose keys are in the folder. Ctrl-C stops it."""
    require("flwr", "motley deploy")
    from motley.deploy.commands import serve
    from motley.deploy.folder import DeployFolder

    with _stopped_by_signals():
        raise typer.Exit(serve(DeployFolder.open(path)))


@deploy.command(cls=Command)
def node(
    path: Path = typer.Argument(..., metavar="NODE", help="The node's folder, with its node.toml."),
    patience: float = typer.Option(
        120.0, help="Seconds to keep trying if the server rejects the node."
    ),
) -> None:
    """Start a node (Flower's SuperNode) with the folder's key and data. Ctrl-C stops it."""
    require("flwr", "motley deploy")
    from motley.cli.code import import_from
    from motley.deploy.node import be_node
    from motley.flower.settings import read_node

    code = read_node(path / "node.toml").code
    if code:
        import_from(Path(code))
    with _stopped_by_signals():
        be_node(path / "node.toml", patience)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Leave the block normally on Ctrl-C and SIGTERM, so that it can stop its child processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit from None


@deploy.command(cls=Command)
def run(path: Path = FOLDER) -> None:
    """Start the federation's run, or resume it after an interruption."""
    require("flwr", "motley deploy")
    from motley.cli.code import import_for_runs
    from motley.deploy.commands import play
    from motley.deploy.folder import DeployFolder

    import_for_runs(path)
    play(DeployFolder.open(path))


@deploy.command(cls=Command)
def status(path: Path = FOLDER) -> None:
    """Show the nodes and runs that the server knows."""
    require("flwr", "motley deploy")
    from rich.console import Console

    from motley.cli.code import import_for_runs
    from motley.deploy.control import Control
    from motley.deploy.folder import DeployFolder
    from motley.deploy.status import node_table, run_lines

    import_for_runs(path)
    folder = DeployFolder.open(path)
    control = Control(folder)
    nodes, runs = control.nodes(), control.runs()
    print(f"server at {folder.read_settings().address}")
    Console().print(node_table(folder, nodes))
    for line in run_lines(folder, runs):
        print(line)
