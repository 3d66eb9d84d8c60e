"""A configuration made of Python objects: the arguments of `motley.Federation`.

Everything that has a name in a configuration may also be an object: a class, a function, a data set
in memory. An object that other processes can import is written into the configuration as its dotted
path. Any other one gets a name that only this process knows, so the federation runs, and a run
folder for it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch

from motley.client.training import OPTIMIZER_CLASSES
from motley.config import Config, resolve
from motley.core.dotted import describe, path_of
from motley.core.errors import MotleyError
from motley.core.registry import Entry, Registry
from motley.data import DATASETS, PARTITIONS, Dataset, Partition, PartitionSettings
from motley.methods import METHODS
from motley.models import MODELS
from motley.server.optimizer import SERVER_OPTIMIZER_CLASSES
from motley.server.pipeline import STAGES, ServerStage
from motley.settings import Configured, Settings
from motley.splits import SPLITS
from motley.tasks import LOSSES, METRICS

# ---- the server's parts


class InCo:
    """InCo Aggregation, as an entry of `Federation(server=[...])`."""

    def __init__(self, variant: str = "official", **settings: Any) -> None:
        """`variant` is "paper" or "official"; `settings` are keys of `[server.inco]`."""
        self.table = {"inco": {"variant": variant, **settings}}


class EMA:
    """A moving average of the global model over rounds, which is evaluated in its place."""

    def __init__(self, decay: float) -> None:
        self.table = {"ema_decay": decay}


class ServerOptimizer:
    """An optimizer that takes the averaged delta as its gradient."""

    def __init__(self, optimizer: Any, **settings: Any) -> None:
        """`optimizer` is a name ("adam"), or a subclass of motley.ServerOptimizerSettings."""
        self.optimizer, self.settings = optimizer, settings


# ---- a configuration


@dataclass
class Description:
    """A configuration, and the objects that it cannot hold."""

    config: Config
    dataset: Dataset | None
    #: The entries of objects without a dotted path. Their names are known as long as these exist.
    in_memory: list[Entry[Any]] = field(default_factory=list)


def describe_federation(
    *,
    models: Any,
    data: Any,
    partition: Any,
    clients: int | None,
    clients_per_round: int | None,
    split: Any,
    method: Any,
    server: Sequence[Any],
    training: Mapping[str, Any] | None,
    task: str | Mapping[str, Any] | None,
    engine: str,
    seed: int,
    settings: Mapping[str, Any] | None,
) -> Description:
    """Return the configuration that the arguments of `Federation` describe."""
    writer = _Writer()
    dataset = data if isinstance(data, Dataset) else None
    if settings is not None:
        settings = _table("settings", settings, "{'evaluation': {'every': 5}}")
        if "preset" in settings:
            raise MotleyError(
                f"settings: preset = {settings['preset']!r}: cannot be given beside objects. "
                "motley.Federation(motley.load_config(preset=...)) runs a preset."
            )
    table: dict[str, Any] = {"seed": seed, "model": writer.models(models)}
    if not (isinstance(data, Dataset | str | Mapping) or callable(data)):
        raise MotleyError(
            f"data: is {describe(data)}; the name of a data set is expected, or a "
            "motley.data.Dataset, which motley.data.from_datasets(train, test) makes of PyTorch's "
            "data sets, tensors and arrays."
        )
    table["data"] = writer.named(DATASETS, data, "data")
    if task is not None:
        table["task"] = writer.task(task)
    if partition is None and dataset is not None:
        if dataset.train.clients is not None:
            partition = "natural"
        elif dataset.task != "classification":
            partition = "iid"  # the default needs classes
    if partition is not None:
        table["data"]["partition"] = writer.partition(partition)
    federation = _federation(dataset, partition, clients, clients_per_round)
    if federation:
        table["federation"] = federation
    if split is not None:
        table["split"] = writer.named(SPLITS, split, "split")
    if method is not None:
        table["method"] = writer.named(METHODS, method, "method")
    if server:
        table["server"] = writer.server(server)
    if training is not None:
        table["training"] = writer.training(training)
    if engine != "auto":
        table["engine"] = {"name": engine}
    config = resolve("", [table, settings or {}])
    if dataset is not None:
        _refuse_ineffective(config, table["data"]["name"])
    return Description(config, dataset, writer.in_memory)


def _federation(
    dataset: Dataset | None, partition: Any, clients: int | None, clients_per_round: int | None
) -> dict[str, Any]:
    """Return the numbers of clients. By default, every natural or given client takes part."""
    if isinstance(clients, Integral) and not isinstance(clients, bool):
        clients = int(clients)  # it may be one of NumPy's
    if clients is None and isinstance(partition, Partition):
        clients = len(partition)
    if clients is None and partition == "natural" and dataset is not None:
        assert dataset.train.clients is not None
        clients = len(np.unique(dataset.train.clients))
    table = {}
    if clients is not None:
        table["clients"] = clients
        # Another type than int is refused with the rest of the configuration.
        if clients_per_round is None and isinstance(clients, int) and clients < 5:
            table["clients_per_round"] = clients
    if clients_per_round is not None:
        table["clients_per_round"] = clients_per_round
    return table


def _refuse_ineffective(config: Config, name: str) -> None:
    """Refuse settings that choose or read another data set than the one that was given."""
    if config.data.name != name:
        raise MotleyError(
            f"settings: data.name = {config.data.name!r}: the data set is given as an object. Give "
            "its name as `data` instead."
        )
    for key in ("path", "root", "max_clients", "max_per_client"):
        value = getattr(config.data, key)
        if value:
            raise MotleyError(
                f"settings: data.{key} = {value!r}: has no effect on a data set that is given as "
                "an object."
            )


def _table(label: str, value: Any, example: str) -> dict[str, Any]:
    """Return a copy of an argument that is a table."""
    if not isinstance(value, Mapping):
        raise MotleyError(
            f"{label}: is {describe(value)}; a dictionary is expected, such as {example}."
        )
    return dict(value)


class _Writer:
    """Writes objects into tables of a configuration."""

    def __init__(self) -> None:
        self.in_memory: list[Entry[Any]] = []

    def named(self, registry: Registry[Any], value: Any, label: str) -> dict[str, Any]:
        """Return the table of something that a registry knows, or that is the user's own."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping):
            table = dict(value)
            if not isinstance(table.get("name", ""), str):
                table["name"] = self.name_of(registry, table["name"], f"{label}.name")
            return table
        if isinstance(value, Configured):
            return {**value.settings, "name": self.name_of(registry, value.item, label)}
        if isinstance(value, Settings):
            keys = value.model_dump(exclude={"name"}, exclude_unset=True)
            return {**keys, "name": self._name_of_settings(registry, value, label)}
        return {"name": self.name_of(registry, value, label)}

    def name_of(self, registry: Registry[Any], item: Any, label: str) -> str:
        """Return the name of an object: registered, a dotted path, or for this process only."""
        for entry in registry:
            if entry.item is item:
                return entry.name
        path = path_of(item)
        if path is not None:
            return registry.entry(path, label).name
        own_name = getattr(item, "__name__", None) or getattr(item, "name", None) or label
        try:
            kept = registry.keep(item, str(own_name).strip("<>"))
        except MotleyError as error:
            raise MotleyError(f"{label}: {error}") from error.__cause__
        self.in_memory.append(kept)
        return kept.name

    def _name_of_settings(self, registry: Registry[Any], value: Settings, label: str) -> str:
        """Return the name of the entry that an object of a settings class stands for."""
        named = getattr(value, "name", "")
        for entry in registry:
            settings = entry.item if isinstance(entry.item, type) else None
            settings = getattr(settings, "Settings", settings)
            if settings is type(value) and entry.name == named:
                return entry.name
        return self.name_of(registry, type(value), label)

    def task(self, task: str | Mapping[str, Any]) -> dict[str, Any]:
        """Return the table of the task. Its loss and its metrics may be functions."""
        if isinstance(task, str):
            return {"name": task}
        table = _table("task", task, "{'loss': my_loss, 'metrics': ['accuracy', my_metric]}")
        loss, metrics = table.get("loss", ""), table.get("metrics", ())
        if not isinstance(loss, str):
            table["loss"] = self.name_of(LOSSES, loss, "task.loss")
        if isinstance(metrics, str) or not isinstance(metrics, Sequence):
            metrics = [metrics]
        names = []
        for metric in metrics:
            is_name = isinstance(metric, str)
            names.append(metric if is_name else self.name_of(METRICS, metric, "task.metrics"))
        table["metrics"] = names
        return table

    def models(self, models: Any) -> dict[str, Any]:
        """Return the table of the models: a mapping of names, or a list of registered names."""
        if isinstance(models, str):
            return {"sizes": [models]}
        if not isinstance(models, Mapping):
            if isinstance(models, Sequence) and all(isinstance(size, str) for size in models):
                return {"sizes": list(models)}
            raise MotleyError(
                f"models: is {describe(models)}; a mapping from names to functions that build a "
                "torch.nn.Module is expected, or a list of registered names."
            )
        factories = {}
        for size, model in models.items():
            if model != size:
                name = model
                if not isinstance(model, str):
                    name = self.name_of(MODELS, model, f"models[{size!r}]")
                factories[str(size)] = name
        return {"sizes": [str(size) for size in models], "factories": factories}

    def partition(self, partition: Any) -> dict[str, Any]:
        """Return the table of a partition, which may be a finished one."""
        if isinstance(partition, list | tuple | np.ndarray | torch.Tensor):
            raise MotleyError(
                f"partition: is {describe(partition)}; a name, an object such as "
                "motley.Dirichlet(alpha=0.5), or a motley.data.Partition is expected. "
                "Partition.from_owners(owners, clients) makes one from the client of each example."
            )
        if not isinstance(partition, Partition):
            return self.named(PARTITIONS, partition, "partition")

        class Given(PartitionSettings):
            """The partition that was given to `Federation`."""

            def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
                """Return it, whatever the labels are."""
                return partition

        entry = PARTITIONS.keep(Given, "partition")
        self.in_memory.append(entry)
        return {"name": entry.name}

    def server(self, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the table of the server's parts. Users' stages keep the order of the list."""
        table: dict[str, Any] = {}
        stages = []
        kinds: list[type] = []
        for part in parts if isinstance(parts, Iterable) else [parts]:
            if isinstance(part, InCo | EMA | ServerOptimizer):
                if type(part) in kinds:
                    raise MotleyError(
                        f"server: motley.{type(part).__name__} is given twice. Allowed is one."
                    )
                kinds.append(type(part))
            if isinstance(part, InCo | EMA):
                table |= part.table
            elif isinstance(part, ServerOptimizer):
                optimizer = self.named(SERVER_OPTIMIZER_CLASSES, part.optimizer, "server optimizer")
                table["optimizer"] = {**optimizer, **part.settings}
            elif _is_stage(part):
                stages.append(self.named(STAGES, part, "server"))
            else:
                raise MotleyError(
                    f"server: {describe(part)} is not a part of the server. Allowed are "
                    "motley.InCo, motley.EMA, motley.ServerOptimizer and subclasses of "
                    "motley.ServerStage."
                )
        if stages:
            table["stages"] = stages
        return table

    def training(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table of the clients' training; its optimizer may be a class of torch's."""
        table = _table("training", training, "{'epochs': 2}")
        if "optimizer" in table:
            table["optimizer"] = self.named(
                OPTIMIZER_CLASSES, table["optimizer"], "training.optimizer"
            )
        return table


def _is_stage(part: Any) -> bool:
    item = part.item if isinstance(part, Configured) else part
    return isinstance(item, type) and issubclass(item, ServerStage)
