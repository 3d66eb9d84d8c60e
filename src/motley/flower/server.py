"""Motley's own round loop with Flower nodes as clients (`motley.cli.server_app` is the app)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.serverapp import Grid

from motley.assembly import assign_sizes, build_split
from motley.config import Config
from motley.core.errors import MotleyError
from motley.data import Dataset
from motley.data.device import device_data
from motley.federation import Federation
from motley.flower.engine import FlowerEngine
from motley.flower.nodes import Nodes, Registrar
from motley.plan import assigned, costs_of, read_budgets
from motley.runs.callbacks import Callback
from motley.runs.folder import RunFolder
from motley.runs.run import resume_run, start_run
from motley.server.state import ServerState
from motley.settings import validate


def serve(
    grid: Grid,
    new: Config | None,
    path: Path,
    watchers: Iterable[Callback] = (),
    registrar: Registrar | None = None,
) -> tuple[Federation, ServerState]:
    """Start a run on the nodes of a grid. Without a configuration, resume the run in the folder.

    `registrar` knows which client a node's key is bound to; without it nodes have no keys.
    """
    config = new or RunFolder.open(path).read_config()
    dataset = config.data.load()
    config = with_budgets(config, dataset)
    nodes = Nodes(grid, config, dataset, registrar)
    connected = nodes.find(range(config.federation.clients), all_needed=new is not None)
    if new is None:
        return resume_run(path, watchers, engine=lambda federation: FlowerEngine(nodes))
    absent = [client for client in range(config.federation.clients) if client not in connected]
    if absent:
        raise MotleyError(
            f"engine.flower.wait_s = {config.engine.flower.wait_s:g}: no node came for "
            f"client {', '.join(map(str, absent))}; a run begins with all of its clients."
            + nodes.describe_refused(absent)
        )
    config = with_sizes(config, nodes.sizes)
    nodes.use(config)
    return start_run(config, path, watchers, engine=lambda federation: FlowerEngine(nodes))


def with_budgets(config: Config, dataset: Dataset) -> Config:
    """Replace `federation.budgets` by the sizes that follow from it: nodes lack that file."""
    if config.federation.size_assignment != "budget":
        return config
    data = device_data(dataset.train, config.data.transform, torch.device("cpu"), augment=False)
    costs = costs_of(build_split(config, data.shape, dataset.classes), data.shape, config.training)
    sizes = assigned(
        costs, read_budgets(Path(config.federation.budgets)), config.federation.clients
    )
    chosen = {"size_assignment": "blocks", "budgets": "", "sizes": sizes}
    values = config.model_dump(mode="json")
    return validate(Config, {**values, "federation": {**values["federation"], **chosen}})


def with_sizes(config: Config, sizes: dict[int, str]) -> Config:
    """Return a configuration in which every client has the size that its node has named."""
    chosen = tuple(sizes[client] or size for client, size in enumerate(assign_sizes(config)))
    if chosen == assign_sizes(config):
        return config
    values = config.model_dump(mode="json")
    return validate(
        Config,
        {**values, "federation": {**values["federation"], "sizes": chosen, "size_fractions": []}},
    )
