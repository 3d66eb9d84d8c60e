"""`motley deploy`: run a federation on several machines, with Flower."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
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
NODE = typer.Argument(..., metavar="NODE", help="The node's folder, with its node.toml.")
CLIENT = typer.Argument(..., metavar="CLIENT", help="The client's number.")


class KeyPlace(StrEnum):
    """Where the private keys of the nodes are made."""

    HERE = "here"
    NODES = "nodes"


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
    keys: KeyPlace | None = typer.Option(
        None,
        help="Where the nodes' private keys are made: here, in the new folder, or on the nodes, "
        "which send their public keys. Default: here if the host is this machine.",
    ),
) -> None:
    """Write a folder with the run's configuration, certificates, and one folder per node."""
    require("flwr", "motley deploy")
    from motley.cli.code import import_beside
    from motley.config import load_config
    from motley.deploy.folder import DeploySettings, create
    from motley.settings import validate

    import_beside(file)
    settings = validate(DeploySettings, {"host": host, "port": port, "insecure": insecure})
    # Nodes may be away, or malicious. A round with fewer than half of its updates is repeated, and
    # norms of updates are limited, unless --set says otherwise.
    defaults = ["server.min_fraction=0.5", "server.max_norm=auto"]
    overrides = [*defaults, *set_, "engine.name=flower"]
    config = load_config(file, preset=preset, overrides=overrides)
    folder = create(path, config, settings, keys.value if keys is not None else None)
    clients = config.federation.clients
    print(f"{clients} nodes, server at {settings.address}\n")
    print(f"on the server:     motley deploy server {path}")
    has_keys = settings.insecure or bool(folder.public_keys())
    if has_keys:
        for client in range(clients):
            print(f"on node {client:>3}:       motley deploy node {path}/nodes/node-{client}")
        if not settings.loopback:
            print(f"after copying:     motley deploy handover {path}")
    else:
        print(f"to each node N:    copy {path}/nodes/node-N (scp -r)")
        print("on node N:         motley deploy keygen node-N, and send node-N/key.pub back")
        print(f"on the server:     motley deploy admit {path} N --key key.pub")
        print("on node N:         motley deploy node node-N")
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
def keygen(
    path: Path = NODE,
    replace: bool = typer.Option(
        False, "--replace", help="Replace the node's key; the server has to admit the new one."
    ),
) -> None:
    """Make a node's key pair on its own machine. Only key.pub leaves it, for the server."""
    require("flwr", "motley deploy")
    from motley.deploy.keys import make_node_key
    from motley.deploy.node import print_how_to_admit
    from motley.deploy.permissions import private_files
    from motley.flower.settings import read_node

    client = read_node(path / "node.toml").client
    with private_files():
        fingerprint = make_node_key(path, replace=replace)
    print_how_to_admit(client, path, fingerprint)


@deploy.command(cls=Command)
def admit(
    path: Path = FOLDER,
    client: int = CLIENT,
    key: Path | None = typer.Option(
        None, help="The key.pub that the node made; default: the key that the client had."
    ),
) -> None:
    """Admit a node's public key, also while the federation runs. It replaces the one before."""
    require("flwr", "motley deploy")
    from motley.deploy.commands import admit_key
    from motley.deploy.folder import DeployFolder

    admit_key(DeployFolder.open(path), client, key)


@deploy.command(cls=Command)
def revoke(path: Path = FOLDER, client: int = CLIENT) -> None:
    """Revoke a node's key, also while the federation runs: the run goes on without the node."""
    require("flwr", "motley deploy")
    from motley.deploy.commands import revoke_key
    from motley.deploy.folder import DeployFolder

    revoke_key(DeployFolder.open(path), client)


@deploy.command(cls=Command)
def handover(
    path: Path = FOLDER,
    clients: list[int] | None = typer.Argument(
        None, metavar="[CLIENT]...", help="The clients' numbers; default: all."
    ),
) -> None:
    """Delete nodes' private keys on the server, after their folders were copied to the nodes."""
    require("flwr", "motley deploy")
    from motley.deploy.commands import hand_over
    from motley.deploy.folder import DeployFolder

    hand_over(DeployFolder.open(path), clients or ())


@deploy.command(cls=Command)
def node(
    path: Path = NODE,
    patience: float = typer.Option(
        120.0, help="Seconds to keep trying if the server rejects the node."
    ),
) -> None:
    """Start a node (Flower's SuperNode) with the folder's key and data. Ctrl-C stops it.

    A node without a key makes one, which the server has to admit.
    """
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
    from motley.deploy.commands import run_deployment
    from motley.deploy.folder import DeployFolder

    import_for_runs(path)
    run_deployment(DeployFolder.open(path))


@deploy.command(cls=Command)
def status(path: Path = FOLDER) -> None:
    """Show the nodes and runs that the server knows."""
    require("flwr", "motley deploy")
    from motley.cli.code import import_for_runs
    from motley.cli.terminal import Console
    from motley.deploy.control import Control
    from motley.deploy.folder import DeployFolder
    from motley.deploy.status import node_table, run_lines

    import_for_runs(path)
    folder = DeployFolder.open(path)
    control = Control(folder)
    nodes, runs = control.nodes(), control.runs()
    print(f"server at {folder.read_settings().address}")
    Console().print_list(node_table(folder, nodes))
    for line in run_lines(folder, runs):
        print(line)
