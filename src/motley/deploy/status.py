"""Prints nodes and runs in the federation's terms: clients and sizes instead of Flower's ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from motley.assembly import assign_sizes
from motley.deploy.folder import DeployFolder
from motley.deploy.identity import bound_keys, revoked_clients
from motley.flower.settings import read_node
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog

#: Flower's names for the states of a node, and ours.
STATES = {"registered": "never connected", "online": "online", "offline": "offline"}


def nodes_of_clients(folder: DeployFolder, nodes: Sequence[Any]) -> dict[int, Any]:
    """Return Flower's NodeInfo of each client, by the key in the folder node-CLIENT."""
    clients = bound_keys(folder)
    return {clients[node.public_key]: node for node in nodes if node.public_key in clients}


def missing_clients(nodes: Mapping[int, Any], clients: int) -> list[int]:
    """Return the clients whose nodes are not online."""
    online = {client for client, node in nodes.items() if node.status == "online"}
    return [client for client in range(clients) if client not in online]


def node_table(folder: DeployFolder, nodes: Sequence[Any]) -> Table:
    """Return a table with one row per node."""
    table = Table("client", "node", "size", "device", "state", "since (UTC)")
    # Copied into Flower's own commands, so never shortened.
    table.add_column("Flower's id", no_wrap=True, min_width=20)
    if folder.read_settings().insecure:
        # Without keys the server does not know which client a node is until a run asks the node.
        for info in nodes:
            table.add_row("?", "", "", "", *_state(info))
        return table
    sizes = assign_sizes(_run_config(folder))
    listed = nodes_of_clients(folder, nodes)
    states = {client: _state(info) for client, info in listed.items()}
    for client in range(len(sizes)):
        if client not in folder.public_keys():
            states[client] = ("no key yet", "", "")
    for client in revoked_clients(folder):
        states[client] = ("key revoked", "", "")
    for client, state in sorted(states.items()):
        file = folder.nodes / f"node-{client}" / "node.toml"
        device = read_node(file).device if file.exists() else ""
        size = sizes[client] if client < len(sizes) else ""
        table.add_row(str(client), file.parent.name, size, device, *state)
    return table


def _run_config(folder: DeployFolder) -> Any:
    """Return the run's configuration; once it has begun, with the sizes that nodes have named."""
    run = RunFolder(folder.run)
    return run.read_config() if run.config.exists() else folder.read_config()


def _state(info: Any) -> tuple[str, str, str]:
    changed = {"online": info.last_activated_at, "offline": info.last_deactivated_at}.get(
        info.status, ""
    )
    return STATES.get(info.status, info.status), _moment(changed), str(info.node_id)


def run_lines(folder: DeployFolder, runs: Sequence[Any]) -> list[str]:
    """Return one line per attempt at the run, the latest first, and one line with its progress."""
    if not runs:
        return ["no run yet"]
    lines = []
    for run in runs:
        state = run.status.status if run.status.status != "finished" else run.status.sub_status
        reason = run.status.details.removeprefix("ServerApp failed with exception: ")
        since = run.finished_at or run.running_at or run.pending_at
        lines.append(f"run {run.run_id}: {state} since {_moment(since)}")
        if state == "failed" and reason:
            lines[-1] += f": {reason}"
    done = MetricsLog(folder.run / "metrics.jsonl").read()
    if done:
        lines.append(f"round {done[-1]['round']} of {_run_config(folder).training.rounds} is done")
    return lines


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S}" if text else ""
