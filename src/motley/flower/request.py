"""Reads and checks the messages to a node. The server is not trusted, so every value is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from motley.client.job import CollectionName, Job
from motley.config import Config
from motley.core.errors import MotleyError
from motley.flower.arrays import unpack
from motley.flower.failures import NodeError, failing_as
from motley.flower.run_config import from_text, refuse_unknown_code
from motley.flower.settings import NodeSettings
from motley.models.inputs import InputShape, shape_from_json
from motley.tasks import TASKS, Task

COLLECTIONS: dict[str, CollectionName] = {
    "method": "method",
    "statistics": "statistics",
    "evaluation": "evaluation",
    "client-score": "client-score",
    "personalized-score": "personalized-score",
}


@dataclass(frozen=True)
class Request:
    """A message to a node, with the run's configuration in the node's terms (run_config.py)."""

    content: RecordDict
    #: Flower's number of the run.
    run: int
    #: The configuration as it was sent.
    text: str
    config: Config
    #: The kind and shape of the federation's inputs, before any transform.
    shape: InputShape
    classes: int
    task: Task

    def number(self, name: str) -> int:
        """Return one of the job's whole numbers."""
        values: Any = self.content["job"]
        with failing_as("bad-message"):
            return int(values[name])


def read_request(node: NodeSettings, content: RecordDict, run: int) -> Request:
    """Read a message, and refuse a run with less privacy than the node accepts."""
    with failing_as("bad-message"):
        values: Any = content["job"]
        text = str(values["config"])
        shape = shape_from_json(str(values["inputs"]))
        classes = int(values["classes"])
        task_name = str(values["task"])
    config = from_text(text, node)
    refuse_unknown_code(node, "task", task_name)
    with failing_as("bad-message"):
        TASKS.entry(task_name, "task")
    with failing_as("bad-config"):
        task = config.task.build(task_name)
    if refusal := node.privacy.refusal(config.privacy):
        raise NodeError("refused-by-node", f"the run has {refusal}")
    clients = config.federation.clients
    if node.client >= clients:
        reason = f"client = {node.client}: the run has federation.clients = {clients}."
        raise NodeError("refused-by-node", reason)
    return Request(content, run, text, config, shape, classes, task)


def read_job(node: NodeSettings, request: Request) -> Job:
    """Return the job in a message, if it is for this node's client and one of the run's sizes."""
    with failing_as("bad-message"):
        values: Any = request.content["job"]
        size = str(values["size"])
        client = int(values["client"])
        state_round = int(values["client_state_round"])
        collection = str(values.get("collection", "method"))
        if collection not in COLLECTIONS:
            allowed = ", ".join(map(repr, COLLECTIONS))
            raise MotleyError(f"collection = {collection!r}: should be one of {allowed}.")
        # Taken out of the message, so that nothing keeps the bytes once they are tensors.
        arrays = request.content.pop("arrays")
        job = Job(
            int(values["round"]),
            client,
            size,
            unpack(arrays, "state"),
            unpack(arrays, "broadcast"),
            state_round if state_round >= 0 else None,
            COLLECTIONS[collection],
        )
    if client != node.client:
        reason = f"client = {node.client}: the job is for client {client}."
        raise NodeError("refused-by-node", reason)
    if size not in request.config.split.sizes(request.config.model.sizes):
        raise NodeError("bad-message", f"the job is for {size!r}: the run has no such size.")
    return job
