"""Flower's own simulation engine, with nodes as Ray tasks, to compare it with the local engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from motley.config import Config
from motley.core.dotted import module_of
from motley.data.files.settings import FileSettings
from motley.data.partition import FromFile
from motley.federation import Federation
from motley.flower.client import build
from motley.flower.server import serve
from motley.flower.settings import NodeData, NodeSettings
from motley.runs.callbacks import Callback
from motley.runs.folder import RunFolder
from motley.runs.plugins import plugins_of
from motley.server.state import ServerState

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def simulate(
    new: Config | None, path: Path, watchers: Iterable[Callback] = ()
) -> tuple[Federation, ServerState]:
    """Run a federation, as `serve` does, on simulated nodes: one Ray worker per core.

    Every node trains on its client's share of the run's data set.
    """
    config = new or RunFolder.open(path).read_config()
    runs: list[tuple[Federation, ServerState]] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        runs.append(serve(grid, new, path, watchers))

    os.environ.update(QUIET)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend: Any = {
        "init_args": {"num_cpus": os.cpu_count(), "log_to_driver": False, "logging_level": "ERROR"},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    plugins = plugins_of(config)
    settings = _settings_of_all_nodes(config, path, [module_of(plugin.path) for plugin in plugins])
    # Ray's workers are processes of their own, with this one's environment.
    folders = dict.fromkeys(plugin.folder for plugin in plugins if plugin.folder)
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, inherited]))
    run_simulation(app, build(settings), config.federation.clients, backend_config=backend)
    return runs[0]


def _settings_of_all_nodes(config: Config, path: Path, modules: Iterable[str]) -> NodeSettings:
    """Return settings that serve for every simulated node."""
    partition = config.data.partition
    lists = str(partition.path.expanduser()) if isinstance(partition, FromFile) else ""
    data = NodeData(
        name=config.data.name,
        path=config.data.path,
        files=config.data.files or FileSettings(),
        root=config.data.root,
        dealt=True,
        partition=lists,
        public=getattr(config.public, "path", ""),
    )
    return NodeSettings(
        client=0,
        data=data,
        memory=str((path / "clients").absolute()),
        repeatable=True,
        modules=tuple(modules),
    )
