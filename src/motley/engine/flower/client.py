"""The node's side of Flower: one client that trains on its own data, and answers with what the method says.

Every message starts a process, so nothing is kept between messages but the client's memory, on the node's disk. A job
is done by the local engine, as it would be on one machine.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from motley.config import Config
from motley.data import Dataset, Partition, load_dataset
from motley.engine.base import Job, Upload
from motley.engine.flower.arrays import pack, unpack
from motley.engine.flower.settings import NodeSettings, read_node
from motley.errors import MotleyError
from motley.federation import Federation, size_in_bytes
from motley.files import write_secret
from motley.settings import validate
from motley.splits.part import State

Work = Callable[[NodeSettings, RecordDict], RecordDict]


def build(simulated: NodeSettings | None = None) -> ClientApp:
    """Return the app of a node, whose file of settings its configuration names; or of all nodes of a simulation."""
    client_app = ClientApp()
    client_app.query()(partial(_answered, introduce, simulated))
    client_app.train()(partial(_answered, train, simulated))
    client_app.train("collect")(partial(_answered, collect, simulated))
    return client_app


def _answered(work: Work, simulated: NodeSettings | None, message: Message, context: Context) -> Message:
    """Do what a message asks, or say why that cannot be done."""
    try:
        return Message(work(settings_of(context, simulated), message.content), reply_to=message)
    except MotleyError as error:
        return Message(Error(0, str(error)), reply_to=message)


def settings_of(context: Context, simulated: NodeSettings | None) -> NodeSettings:
    """Return the settings of the node that a message came to."""
    if simulated is None:
        return read_node(Path(str(context.node_config["motley"])))
    client = int(context.node_config["partition-id"])
    return simulated.model_copy(update={"client": client, "memory": f"{simulated.memory}/client-{client}"})


# ---- what a node does


def introduce(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Say which client this node is, and which size it trains."""
    config_of(node, str(asked(content)["config"]))
    return RecordDict({"node": ConfigRecord({"client": node.client, "size": own_size(node, asked(content))})})


def train(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Do a job. What the client remembers is on the disk before its answer leaves."""
    federation, job = federation_of(node, asked(content)), read_job(node, content)
    uploads = federation.engine.train([job], lambda client: None)
    federation.engine.save_memory({job.client: job.round_number})
    federation.engine.forget_memory({job.client: int(asked(content)["forget"])})
    for upload in uploads:
        assert isinstance(upload, Upload)
        return answer(job, upload.samples, upload.steps, float(upload.loss), upload.change, upload.message)
    return answer(job)


def collect(node: NodeSettings, content: RecordDict) -> RecordDict:
    """Answer for the method's collection."""
    job = read_job(node, content)
    for collection in federation_of(node, asked(content)).engine.collect([job]):
        return answer(job, collection.samples, message=collection.values)
    return answer(job)


# ---- what it needs for that


def asked(content: RecordDict) -> Mapping[str, Any]:
    """Return what a message says beside its arrays."""
    values: Any = content["job"]
    return values


def own_size(node: NodeSettings, about: Mapping[str, Any]) -> str:
    """Return the size a node is set to, or the largest within its budget, or nothing where any will do."""
    if not node.budget_mib:
        return node.size
    split = federation_of(node, about).split
    weights = {size: size_in_bytes(split.blueprints[size].module.state_dict()) / 2**20 for size in split.sizes}
    fitting = {size: weight for size, weight in weights.items() if weight <= node.budget_mib}
    if not fitting:
        raise MotleyError(
            f"budget_mib = {node.budget_mib:g}: no size fits; "
            + ", ".join(f"{size} weighs {weight:.2f}" for size, weight in weights.items())
        )
    return max(fitting, key=lambda size: fitting[size])


def federation_of(node: NodeSettings, about: Mapping[str, Any]) -> Federation:
    """Return the federation as this node sees it: its own client has examples, and nobody else."""
    return _federation(node.model_dump_json(), str(about["config"]), tuple(about["shape"]))


@lru_cache(maxsize=1)
def _federation(settings: str, text: str, shape: tuple[int, ...]) -> Federation:
    node = NodeSettings.model_validate_json(settings)
    config = config_of(node, text)
    dataset, partition = examples(node, config, shape)
    engine = config.engine.model_copy(update={"name": "local", "device": node.device, "slots": 1})
    own = config.model_copy(update={"engine": engine})
    secret = own_secret(Path(node.memory)) if config.privacy.active and not node.repeatable else None
    return Federation(own, dataset=dataset, partition=partition, memory_folder=Path(node.memory), secret=secret)


def config_of(node: NodeSettings, text: str) -> Config:
    """Return a run's configuration, if it guards this node's uploads as the node wants it."""
    config = validate(Config, tomllib.loads(text))
    if short := config.privacy.weaker_than(node.privacy):
        raise MotleyError(f"the run has {short}")
    return config


def own_secret(folder: Path) -> bytes:
    """Return what keys this node's noise: drawn once, and known to nobody else."""
    file, unfinished = folder / "secret", folder / "secret.unfinished"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        write_secret(unfinished, secrets.token_bytes(32))
        unfinished.replace(file)
    return file.read_bytes()


def examples(node: NodeSettings, config: Config, shape: tuple[int, ...]) -> tuple[Dataset, Partition | None]:
    """Return a node's data set, with the federation's classes, and which of its examples are the client's."""
    given, (*image, classes) = node.data, shape
    root, path = (Path(text) if text else None for text in (given.root, given.path))
    read = load_dataset(given.name, root=root, path=path)
    if read.train.images.shape[1:] != tuple(image):
        raise MotleyError(f"data: images are {read.train.images.shape[1:]}; the federation's are {tuple(image)}.")
    dataset = Dataset(read.name, read.train, read.test, classes)
    if given.dealt:
        return dataset, None
    if node.client >= config.federation.clients:
        raise MotleyError(f"client = {node.client}: federation.clients = {config.federation.clients}.")
    count, after = len(dataset.train), config.federation.clients - node.client
    offsets = np.array([0] * (node.client + 1) + [count] * after, dtype=np.int64)
    return dataset, Partition(np.arange(count, dtype=np.int64), offsets)


def read_job(node: NodeSettings, content: RecordDict) -> Job:
    """Return the job in a message, if it is for this node."""
    about = asked(content)
    size, remembers = str(about["size"]), int(about["remembers"])
    if about["client"] != node.client:
        raise MotleyError(f"client = {node.client}: the job is for client {about['client']}.")
    if own_size(node, about) not in ("", size):
        raise MotleyError(f"size = {own_size(node, about)!r}: the job is for {size!r}.")
    state, message = (unpack(content["arrays"], name) for name in ("state", "message"))
    return Job(int(about["round"]), node.client, size, state, message, remembers if remembers >= 0 else None)


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
