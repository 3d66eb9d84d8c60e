"""The node's side of Flower: an app with one client, which trains on its own data.

The process that runs the app stays alive between messages (deploy/worker.py), and so does the
client with its examples and its model: the next message uses it again, unless the run or the node's
files have changed. Results do not depend on that. The client's state is on the node's disk before
an answer leaves, so a process that dies loses no more than the message it was working on.

The server is not trusted. The node reads only files that its own node.toml names (run_config.py).
When it fails, the server learns a kind and a reference, never the text (failures.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, ConfigRecordValues, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from motley.client.job import CLIENT_SCORES, Job
from motley.core.part import State
from motley.engine.base import EngineSettings
from motley.engine.device import choose_devices
from motley.flower.arrays import pack, size_in_bytes
from motley.flower.costs import count_costs
from motley.flower.examples import (
    read_client_tests,
    read_examples,
    read_public,
    read_test_examples,
    stamp_of,
)
from motley.flower.failures import LOG, NodeError, failing_as, keep_text
from motley.flower.ledger import count_update, require_room
from motley.flower.request import Request, read_job, read_request
from motley.flower.settings import NodeSettings, read_node
from motley.node import Client
from motley.plan import Budget, Cost, largest_fitting
from motley.settings import validate

#: Flower's code for an error of an app.
UNKNOWN_ERROR = 0


class ClientCache:
    """The client of the last message. The next message uses it again if it needs the same one."""

    def __init__(self) -> None:
        self._key: object = None
        self._client: Client | None = None

    def get(self, key: object, build: Callable[[], Client]) -> Client:
        """Return the client that `key` identifies; `build` is called if it is not the last one."""
        if self._client is None or self._key != key:
            self.drop()  # first, so that two clients are never in memory at once
            self._client = build()
            self._key = key
        return self._client

    def drop(self) -> None:
        """Free the client."""
        self._client = None


Work = Callable[[NodeSettings, Request, ClientCache], RecordDict]


class NodeApp(ClientApp):
    """An app that reports its failures to the server by kind and reference only."""

    def __init__(self, simulated: NodeSettings | None) -> None:
        super().__init__()
        self.simulated = simulated
        self.clients = ClientCache()

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message.

        Flower would send the text of an exception to the server, so every one is caught here. The
        exceptions that are no `Exception` (a signal, a crash in native code) end the process, and
        Flower sends a fixed sentence.
        """
        try:
            return super().__call__(message, context)
        except Exception as error:
            self.clients.drop()  # it may be in the middle of anything
            return Message(
                Error(UNKNOWN_ERROR, keep_text(error, self.log(context))), reply_to=message
            )

    def log(self, context: Context) -> Path | None:
        """Return the file for the texts of failures, beside node.toml or the simulated states."""
        if self.simulated is not None:
            return Path(self.simulated.memory) / LOG
        file = context.node_config.get("motley")
        return Path(str(file)).parent / LOG if file else None


def build(simulated: NodeSettings | None = None) -> NodeApp:
    """Return the app of a node, whose Flower configuration names its node.toml.

    With `simulated`, return the app of all nodes of a simulation.
    """
    client_app = NodeApp(simulated)
    for register, work in (
        (client_app.query(), introduce),
        (client_app.train(), train),
        (client_app.train("collect"), collect),
    ):
        register(partial(_answer, work, simulated, client_app.clients))
    return client_app


def _answer(
    work: Work,
    simulated: NodeSettings | None,
    clients: ClientCache,
    message: Message,
    context: Context,
) -> Message:
    with failing_as("node-settings"):
        node = settings_of(context, simulated)
    request = read_request(node, message.content, context.run_id)
    content = work(node, request, clients)
    check_reply_size(content, request.config.engine.flower.max_reply_mib)
    return Message(content, reply_to=message)


def check_reply_size(content: RecordDict, limit_mib: float) -> None:
    """Refuse to send an answer that the server would refuse, before anybody stores it."""
    if "arrays" not in content:
        return
    size = size_in_bytes(content["arrays"]) / 2**20
    if size > limit_mib:
        reason = f"the answer has {size:.1f} MiB; engine.flower.max_reply_mib = {limit_mib:g}."
        raise NodeError("too-large", reason)


def settings_of(context: Context, simulated: NodeSettings | None) -> NodeSettings:
    """Return the settings of the node that a message came to."""
    if simulated is None:
        return read_node(Path(str(context.node_config["motley"])))
    client = int(context.node_config["partition-id"])
    folder = f"{simulated.memory}/client-{client}"
    return simulated.model_copy(update={"client": client, "memory": folder})


# ---- the kinds of messages


def introduce(node: NodeSettings, request: Request, clients: ClientCache) -> RecordDict:
    """Say which client this node is, and which size it trains, if it could train at all."""
    sizes = request.config.split.sizes(request.config.model.sizes)
    if node.size and node.size not in sizes:
        reason = f"size = {node.size!r}: the run's sizes are {', '.join(sizes)}."
        raise NodeError("refused-by-node", reason)
    require_room(node, request)
    _, partition = read_examples(node, request)
    read_public(node, request)
    size = chosen_size(node, request)
    about: dict[str, ConfigRecordValues] = {"client": node.client, "size": size}
    if not request.config.privacy.active:  # with [privacy], the number of examples is withheld
        about["num_examples"] = len(partition.of(node.client))
    return RecordDict({"node": ConfigRecord(about)})


def train(node: NodeSettings, request: Request, clients: ClientCache) -> RecordDict:
    """Train a part, and answer with its delta.

    Before that, the client state is saved to disk, and the update is counted in the node's privacy
    ledger.
    """
    job = read_job(node, request)
    require_room(node, request)
    client = client_of(node, request, job.size, clients)
    update = client.train(job, request.number("forget"))
    if update is None:
        return answer(job)
    count_update(node, request, job)
    return answer(
        job,
        num_examples=update.num_examples,
        num_steps=update.num_steps,
        loss=float(update.loss),
        delta=update.delta,
        payload=update.payload,
    )


def collect(node: NodeSettings, request: Request, clients: ClientCache) -> RecordDict:
    """Answer the method's collection, or with BatchNorm statistics if the run recalibrates them.

    If the client has a model or private tensors of its own, it may be asked to score its model. If
    the run scores clients, it may be asked for its score on its own test examples.

    A run with [privacy] has no collections: the values that they report, including the number of
    examples, are neither clipped nor noised. A node therefore refuses them in such a run, whatever
    the server asks. Only scores can be allowed (privacy.reveal_scores).
    A node with a limit on epsilon answers none in a run without noise either.
    """
    job = read_job(node, request)
    refuse_other_collections(request, job)
    # Here too: a server need not introduce itself or train before it asks for a collection.
    require_room(node, request)
    collection = client_of(node, request, job.size, clients).collect(job)
    if collection is None:
        return answer(job)
    num_examples = collection.samples
    if request.config.privacy.active and job.collection == "evaluation":
        num_examples = 1  # how many the client trains on is withheld
    return answer(job, num_examples=num_examples, payload=collection.values)


def refuse_other_collections(request: Request, job: Job) -> None:
    """Refuse a collection that the run's configuration does not allow."""
    config = request.config
    is_score = job.collection in ("evaluation", *CLIENT_SCORES)
    reason = ""
    if config.privacy.active and not is_score:
        reason = "the job asks for a collection, but runs with [privacy] have none."
    elif config.privacy.active and not config.privacy.reveal_scores:
        reason = "the job asks for a score, but the run has privacy.reveal_scores = false."
    elif job.collection == "evaluation" and not config.has_own_models:
        reason = "the job asks for the score of the client's own model, and it has none."
    elif job.collection in CLIENT_SCORES and config.evaluation.per_client == "off":
        reason = "the job asks for the client's score; the run has evaluation.per_client = 'off'."
    elif job.collection == "statistics" and config.server.statistics.name != "recalibrate":
        reason = (
            "the job asks for BatchNorm statistics; "
            "the run has server.statistics.name = 'averaged'."
        )
    if reason:
        raise NodeError("refused-by-node", reason)


def answer(
    job: Job,
    *,
    num_examples: int = 0,
    num_steps: int = 0,
    loss: float = 0.0,
    delta: State | None = None,
    payload: State | None = None,
) -> RecordDict:
    """Return the content of a reply. A client that had nothing to do reports no examples."""
    about: dict[str, ConfigRecordValues] = {
        "round": job.round_number,
        "client": job.client,
        "num_examples": num_examples,
        "num_steps": num_steps,
        "loss": loss,
    }
    arrays = pack(delta=delta or {}, payload=payload or {})
    return RecordDict({"update": ConfigRecord(about), "arrays": arrays})


# ---- its client


def client_of(node: NodeSettings, request: Request, size: str, clients: ClientCache) -> Client:
    """Return this node's client of a size, with its own examples."""
    # Everything that the client is built from, and the run: a new run gets a new client.
    sent = (request.run, request.text, request.shape, request.classes, request.task.name, size)
    key = (sent, node, stamp_of(node))
    return clients.get(key, lambda: build_client(node, request, size))


def build_client(node: NodeSettings, request: Request, size: str) -> Client:
    """Build this node's client of a size, if the node may train that size."""
    refuse_other_sizes(node, request, size)
    folder = Path(node.memory)
    examples, partition = read_examples(node, request)
    public = read_public(node, request)
    with failing_as("node-settings"):
        choose_devices(node.device)
    # Client states are read from the disk when a job needs them: none stays in memory meanwhile.
    node_engine = {"name": "local", "device": node.device, "client_state_host_gib": 0.0}
    with failing_as("bad-config"):
        engine = validate(EngineSettings, {**request.config.engine.model_dump(), **node_engine})
        config = request.config.model_copy(update={"engine": engine})
        classes = request.classes
        return Client(
            config,
            size,
            examples,
            partition,
            classes,
            folder=folder,
            fresh_noise=not node.repeatable,
            read_test_examples=lambda: read_test_examples(node, request),
            read_client_tests=lambda: read_client_tests(node, request),
            public=public,
            task=request.task,
        )


# ---- its size


def chosen_size(node: NodeSettings, request: Request) -> str:
    """Return the size that a node is set to, or the largest one within its budget; empty: any."""
    if not node.budget.limited:
        return node.size
    costs = count_costs(request)
    size = largest_fitting(costs, budget_of(node))
    if size is None:
        smallest = list(costs)[-1]
        needs = describe(costs[smallest])
        reason = f"budget: no size of the run fits. The smallest, {smallest}, takes {needs}."
        raise NodeError("refused-by-node", reason)
    return size


def refuse_other_sizes(node: NodeSettings, request: Request, size: str) -> None:
    """Refuse a job for a size that node.toml does not allow or that exceeds the node's budget."""
    if node.size and node.size != size:
        reason = f"size = {node.size!r}: the job is for {size!r}."
        raise NodeError("refused-by-node", reason)
    if node.budget.limited and not budget_of(node).fits(count_costs(request)[size]):
        reason = f"budget: the job is for {size!r}, which is beyond it."
        raise NodeError("refused-by-node", reason)


def budget_of(node: NodeSettings) -> Budget:
    """Return a node's limits as a line of budgets.csv."""
    return Budget(str(node.client), **node.budget.model_dump())


def describe(cost: Cost) -> str:
    """Return the cost of a size as text, with the keys of node.toml's [budget]."""
    memory_mb, gflops = cost.memory / 1e6, cost.flops / 1e9
    return f"memory_mb = {memory_mb:.1f}, parameters = {cost.parameters}, gflops = {gflops:.3g}"


app = build()
