"""The node's side of Flower: one client that trains on its own data, and answers with its update.

Every message starts a process, so nothing is kept between messages but the client's state, on the node's disk. A job
is done by the local engine, as it would be on one machine.

The server is not trusted. The node reads only files that its own node.toml names (run_config.py), and of a failure the
server learns a kind and a reference, never its text (failures.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from motley.assembly import build_split
from motley.client import Client
from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.data import Dataset, Examples, Partition, load_dataset
from motley.engine.base import Job
from motley.engine.device import choose_devices
from motley.engine.training import TrainingSettings
from motley.files import write_secret
from motley.flower.arrays import pack, unpack
from motley.flower.failures import NodeError, failing_as, keep_text
from motley.flower.run_config import from_text
from motley.flower.settings import NodeSettings, read_node
from motley.models import ImageShape
from motley.plan import Budget, cost_of, costs_of, largest_fitting
from motley.splits import Split

Work = Callable[[NodeSettings, RecordDict], RecordDict]

UNKNOWN_ERROR = 0
"""Flower's code for an error of an app."""
LOG = "node.log"


class NodeApp(ClientApp):
    """An app whose failures are told to the server by kind and reference only."""

    def __init__(self, simulated: NodeSettings | None) -> None:
        super().__init__()
        self.simulated = simulated

    def __call__(self, message: Message, context: Context) -> Message:
        """Do what a message asks.

        Flower would send the text of an exception to the server, so every one is caught here. The exceptions that are
        no `Exception` (a signal, a crash in native code) end the process, and Flower sends a fixed sentence.
        """
        try:
            return super().__call__(message, context)
        except Exception as error:
            return Message(Error(UNKNOWN_ERROR, keep_text(error, self.log(context))), reply_to=message)

    def log(self, context: Context) -> Path | None:
        """Return the file for the texts of failures: beside node.toml, or beside the simulated clients' states."""
        if self.simulated is not None:
            return Path(self.simulated.memory) / LOG
        file = context.node_config.get("motley")
        return Path(str(file)).parent / LOG if file else None


def build(simulated: NodeSettings | None = None) -> ClientApp:
    """Return the app of a node, whose configuration names its node.toml; or of all nodes of a simulation."""
    client_app = NodeApp(simulated)
    client_app.query()(partial(_answered, introduce, simulated))
    client_app.train()(partial(_answered, train, simulated))
    client_app.train("collect")(partial(_answered, collect, simulated))
    return client_app


def _answered(work: Work, simulated: NodeSettings | None, message: Message, context: Context) -> Message:
    with failing_as("node-settings"):
        node = settings_of(context, simulated)
    return Message(work(node, message.content), reply_to=message)


def settings_of(context: Context, simulated: NodeSettings | None) -> NodeSettings:
    """Return the settings of the node that a message came to."""
    if simulated is None:
        return read_node(Path(str(context.node_config["motley"])))
    client = int(context.node_config["partition-id"])
    return simulated.model_copy(update={"client": client, "memory": f"{simulated.memory}/client-{client}"})


# ---- what a node does


def introduce(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Say which client this node is, and which size it trains, if it could train at all."""
    about = asked(content)
    config = config_of(node, about)
    sizes = config.split.sizes(config.model.sizes)
    if node.size and node.size not in sizes:
        raise NodeError("refused-by-node", f"size = {node.size!r}: the run's sizes are {', '.join(sizes)}.")
    examples(node, config, about["shape"])
    return RecordDict({"node": ConfigRecord({"client": node.client, "size": own_size(node, about)})})


def train(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Do a job. The client's state is on the disk before its answer leaves."""
    about, job = asked(content), read_job(node, content)
    upload = client_of(node, about, job.size).train(job, about["forget"])
    if upload is None:
        return answer(job)
    return answer(job, upload.num_examples, upload.num_steps, float(upload.loss), upload.delta, upload.payload)


def collect(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Answer for the method's collection, or with BatchNorm statistics if the run recalibrates them.

    A run with [privacy] has no collections: what they report, the number of examples included, is neither clipped nor
    noised. So a server cannot have a guarded node report anything of its data.
    """
    about, job = asked(content), read_job(node, content)
    client = client_of(node, about, job.size)
    if client.config.privacy.active:
        raise NodeError("refused-by-node", "the job asks for a collection, but runs with [privacy] have none.")
    if job.collection == "statistics" and client.config.server.statistics.name != "recalibrate":
        raise NodeError(
            "refused-by-node",
            "the job asks for BatchNorm statistics; the run has server.statistics.name = 'averaged'.",
        )
    collection = client.collect(job)
    if collection is None:
        return answer(job)
    return answer(job, collection.samples, message=collection.values)


# ---- what it needs for that


def asked(content: RecordDict) -> Mapping[str, Any]:
    """Return what a message says beside its arrays, each value of its type."""
    with failing_as("bad-message"):
        values: Any = content["job"]
        height, width, channels, classes = map(int, values["shape"])
        about: dict[str, Any] = {"config": str(values["config"]), "shape": (height, width, channels, classes)}
        for name in ("round", "client", "remembers", "forget"):
            if name in values:
                about[name] = int(values[name])
        if "size" in values:
            about["size"] = str(values["size"])
        about["collection"] = str(values.get("collection", "method"))
        if about["collection"] not in ("method", "statistics"):
            raise MotleyError(f"collection = {about['collection']!r}: should be 'method' or 'statistics'.")
        return about


def config_of(node: NodeSettings, about: Mapping[str, Any]) -> Config:
    """Return the run's configuration, if it guards this node's uploads as much as the node asks for."""
    config = from_text(about["config"], node)
    if short := config.privacy.weaker_than(node.privacy):
        raise NodeError("refused-by-node", f"the run has {short}")
    if node.client >= config.federation.clients:
        raise NodeError(
            "refused-by-node", f"client = {node.client}: the run has federation.clients = {config.federation.clients}."
        )
    return config


def own_size(node: NodeSettings, about: Mapping[str, Any]) -> str:
    """Return the size that a node is set to, or the largest one within its budget; empty: any."""
    if not node.budget.limited:
        return node.size
    split, shape, training = planned(node, about)
    costs = costs_of(split, shape, training)
    size = largest_fitting(costs, budget_of(node))
    if size is None:
        least = list(costs)[-1]
        raise NodeError(
            "refused-by-node",
            f"budget: no size of the run fits. The smallest, {least}, takes memory_mb = "
            f"{costs[least].memory / 1e6:.1f}, parameters = {costs[least].parameters}, gflops = "
            f"{costs[least].flops / 1e9:.3g}.",
        )
    return size


def budget_of(node: NodeSettings) -> Budget:
    """Return a node's limits as a line of budgets.csv."""
    return Budget(str(node.client), **node.budget.model_dump())


def refuse_other_sizes(node: NodeSettings, size: str, about: Mapping[str, Any]) -> None:
    """Refuse a job of a size that the node is not set to, or that is beyond its budget."""
    config = config_of(node, about)
    if size not in config.split.sizes(config.model.sizes):
        raise NodeError("bad-message", f"the job is for {size!r}: the run has no such size.")
    if node.size and node.size != size:
        raise NodeError("refused-by-node", f"size = {node.size!r}: the job is for {size!r}.")
    if not node.budget.limited:
        return
    split, shape, training = planned(node, about)
    if not budget_of(node).fits(cost_of(split, size, shape, training)):
        raise NodeError("refused-by-node", f"budget: the job is for {size!r}, which is beyond it.")


def planned(node: NodeSettings, about: Mapping[str, Any]) -> tuple[Split, ImageShape, TrainingSettings]:
    """Return what the costs of the run's sizes are counted from: models without memory, the images, the training."""
    config = config_of(node, about)
    height, width, channels, classes = about["shape"]
    with failing_as("bad-config"):
        shape = config.data.transform.shape_of(ImageShape(channels, height, width))
        return build_split(config, shape, classes), shape, config.training


def client_of(node: NodeSettings, about: Mapping[str, Any], size: str) -> Client:
    """Return this node's client of a size, with its own examples."""
    config, folder = config_of(node, about), Path(node.memory)
    train, partition = examples(node, config, about["shape"])
    with failing_as("node-settings"):
        choose_devices(node.device)
        secret = own_secret(folder) if config.privacy.active and not node.repeatable else None
    engine = config.engine.model_copy(update={"name": "local", "device": node.device})
    own = config.model_copy(update={"engine": engine})
    with failing_as("bad-config"):
        return Client(own, size, train, partition, about["shape"][-1], folder=folder, secret=secret)


def own_secret(folder: Path) -> bytes:
    """Return the key of this node's noise: drawn once, and known to nobody else."""
    file, unfinished = folder / "secret", folder / "secret.unfinished"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        write_secret(unfinished, secrets.token_bytes(32))
        unfinished.replace(file)
    return file.read_bytes()


def examples(node: NodeSettings, config: Config, shape: tuple[int, ...]) -> tuple[Examples, Partition]:
    """Return a node's training examples, if they fit the run, and which of them are the client's."""
    *image, classes = shape
    with failing_as("data"):
        train = read_data(node).train
        if train.images.shape[1:] != tuple(image):
            raise MotleyError(f"data: images are {train.images.shape[1:]}; the federation's are {tuple(image)}.")
        low, high = int(train.labels.min()), int(train.labels.max())
        if low < 0 or high >= classes:
            raise MotleyError(
                f"data set {node.data.name!r}: train labels go from {low} to {high}; the federation's {classes} "
                f"classes are 0..{classes - 1}."
            )
        if node.data.dealt:
            return train, config.data.partition.split(train.labels, config.federation.clients, config.seed)
    count, after = len(train), config.federation.clients - node.client
    offsets = np.array([0] * (node.client + 1) + [count] * after, dtype=np.int64)
    return train, Partition(np.arange(count, dtype=np.int64), offsets)


def read_data(node: NodeSettings) -> Dataset:
    """Read the data set that a node's own settings name. A node needs no test part."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    return load_dataset(node.data.name, root=root, path=path, tested=False)


def read_job(node: NodeSettings, content: RecordDict) -> Job:
    """Return the job in a message, if it is for this node."""
    about = asked(content)
    with failing_as("bad-message"):
        size, client, remembers = about["size"], about["client"], about["remembers"]
        arrays = content.pop("arrays")  # so that nobody keeps the bytes once they are tensors
        state, message = (unpack(arrays, name) for name in ("state", "message"))
        remembered = remembers if remembers >= 0 else None
        job = Job(about["round"], client, size, state, message, remembered, about["collection"])
    if client != node.client:
        raise NodeError("refused-by-node", f"client = {node.client}: the job is for client {client}.")
    refuse_other_sizes(node, size, about)
    return job


def answer(
    job: Job,
    samples: int = 0,
    steps: int = 0,
    loss: float = 0.0,
    change: State | None = None,
    message: State | None = None,
) -> RecordDict:
    """Return what travels back; a client that had nothing to do answers with no samples."""
    about = ConfigRecord(
        {"round": job.round_number, "client": job.client, "samples": samples, "steps": steps, "loss": loss}
    )
    return RecordDict({"upload": about, "arrays": pack(change=change or {}, message=message or {})})


app = build()
