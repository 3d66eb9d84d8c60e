"""The node's side of Flower: one client that trains on its own data, and answers with its update.

Every message starts a process, so nothing is kept between messages but the client's state, on the node's disk. A job
is done by the local engine, as it would be on one machine.

The server is not trusted. The node reads only files that its own node.toml names (run_config.py), and of a failure the
server learns a kind and a reference, never its text (failures.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.data import Dataset, Partition, load_dataset
from motley.engine.base import Job, Upload
from motley.engine.device import choose_devices
from motley.federation import Federation, deal
from motley.files import write_secret
from motley.flower.arrays import pack, unpack
from motley.flower.failures import NodeError, failing_as, keep_text
from motley.flower.run_config import from_text
from motley.flower.settings import NodeSettings, read_node
from motley.plan import Budget, cost_of, costs_of, largest_fitting

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
    federation = federation_of(node, about)
    uploads = federation.engine.train([job], lambda client: None)
    federation.engine.save_memory({job.client: job.round_number})
    federation.engine.forget_memory({job.client: about["forget"]})
    for upload in uploads:
        assert isinstance(upload, Upload)
        return answer(job, upload.samples, upload.steps, float(upload.loss), upload.change, upload.message)
    return answer(job)


def collect(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Answer for the method's collection, or with BatchNorm statistics if the run recalibrates them.

    A run with [privacy] never does, so that a server cannot have a guarded node report statistics of its data.
    """
    job = read_job(node, content)
    federation = federation_of(node, asked(content))
    if job.collection == "statistics" and federation.config.server.statistics != "recalibrate":
        raise NodeError(
            "refused-by-node",
            "the job asks for BatchNorm statistics; the run has server.statistics = 'averaged'.",
        )
    for collection in federation.engine.collect([job]):
        return answer(job, collection.samples, message=collection.values)
    return answer(job)


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
    federation = federation_of(node, about)
    costs = costs_of(federation.split, federation.method.world.image, federation.config.training)
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
    if node.size and node.size != size:
        raise NodeError("refused-by-node", f"size = {node.size!r}: the job is for {size!r}.")
    if not node.budget.limited:
        return
    federation = federation_of(node, about)
    if size not in federation.split.sizes:
        raise NodeError("bad-message", f"the job is for {size!r}: the run has no such size.")
    cost = cost_of(federation.split, size, federation.method.world.image, federation.config.training)
    if not budget_of(node).fits(cost):
        raise NodeError("refused-by-node", f"budget: the job is for {size!r}, which is beyond it.")


def federation_of(node: NodeSettings, about: Mapping[str, Any]) -> Federation:
    """Return the federation as this node sees it: only its own client has examples."""
    return _federation(node.model_dump_json(), about["config"], about["shape"])


@lru_cache(maxsize=1)
def _federation(settings: str, text: str, shape: tuple[int, ...]) -> Federation:
    node = NodeSettings.model_validate_json(settings)
    config, folder = config_of(node, {"config": text}), Path(node.memory)
    dataset, partition = examples(node, config, shape)
    with failing_as("node-settings"):
        choose_devices(node.device)
        secret = own_secret(folder) if config.privacy.active and not node.repeatable else None
    engine = config.engine.model_copy(update={"name": "local", "device": node.device, "slots": 1})
    own = config.model_copy(update={"engine": engine})
    with failing_as("bad-config"):
        return Federation(own, dataset=dataset, partition=partition, memory_folder=folder, secret=secret)


def own_secret(folder: Path) -> bytes:
    """Return the key of this node's noise: drawn once, and known to nobody else."""
    file, unfinished = folder / "secret", folder / "secret.unfinished"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        write_secret(unfinished, secrets.token_bytes(32))
        unfinished.replace(file)
    return file.read_bytes()


def examples(node: NodeSettings, config: Config, shape: tuple[int, ...]) -> tuple[Dataset, Partition]:
    """Return a node's data set, with the federation's classes, and which of its examples are the client's."""
    *image, classes = shape
    with failing_as("data"):
        read = read_data(node)
        if read.train.images.shape[1:] != tuple(image):
            raise MotleyError(f"data: images are {read.train.images.shape[1:]}; the federation's are {tuple(image)}.")
        dataset = Dataset(read.name, read.train, read.test, classes)
        if node.data.dealt:
            return dataset, deal(config, dataset)
    count, after = len(dataset.train), config.federation.clients - node.client
    offsets = np.array([0] * (node.client + 1) + [count] * after, dtype=np.int64)
    return dataset, Partition(np.arange(count, dtype=np.int64), offsets)


def read_data(node: NodeSettings) -> Dataset:
    """Read the data set that a node's own settings name."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    return load_dataset(node.data.name, root=root, path=path)


def read_job(node: NodeSettings, content: RecordDict) -> Job:
    """Return the job in a message, if it is for this node."""
    about = asked(content)
    with failing_as("bad-message"):
        size, client, remembers = about["size"], about["client"], about["remembers"]
        state, message = (unpack(content["arrays"], name) for name in ("state", "message"))
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
