"""The connected nodes by client, and which node may act as which client.

A node states its client number when it is asked. The number alone proves nothing, so with keys it
is accepted only from the node whose key is bound to it (a `Registrar` knows that). Without keys,
the first node that states a number keeps it while it is connected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from motley.config import Config
from motley.core.errors import MotleyError
from motley.data import Dataset
from motley.flower.answers import Refused, answers_from
from motley.flower.failures import error_text, is_nodes_own
from motley.flower.run_config import to_text
from motley.models.inputs import shape_to_json

#: Longest pause between two polls for answers, in seconds; every poll is one request per answer.
POLL_S = 1.0
#: A node that has not said which client it is after this many seconds is asked again. The question
#: or the answer may have been lost with a process that was killed, and a node that failed may have
#: recovered.
ASK_AGAIN_S = 60.0
#: Seconds that a question lives. An answer to an earlier question is still accepted, because a busy
#: machine can take longer than ASK_AGAIN_S to start the training process.
QUESTION_S = 600.0

NOT_CONNECTED = "its node is not connected."
REVOKED = "its key was revoked."


class Registrar(Protocol):
    """Knows the keys of a federation's nodes."""

    def clients_of(self, nodes: Collection[int]) -> Mapping[int, int | None]:
        """Return the client that each node's key is bound to; None if it is bound to no client.

        Nodes are named by Flower's ids. A node whose key is not known yet is absent.
        """
        ...

    def revoked(self) -> Collection[int]:
        """Return the clients whose keys were revoked."""
        ...


class Statement(NamedTuple):
    """A node's answer to the question who it is."""

    client: int
    #: Empty: any size.
    size: str
    #: How many examples the node has; None if it does not say, because of [privacy].
    num_examples: int | None = None


class Nodes:
    """The connected nodes, by client."""

    def __init__(
        self, grid: Grid, config: Config, dataset: Dataset, registrar: Registrar | None = None
    ) -> None:
        """Without a registrar there are no keys, and nodes are taken at their word."""
        self.grid, self.settings = grid, config.engine.flower
        self.answers = answers_from(grid, self.settings.max_reply_mib * 2**20)
        self.registrar = registrar
        #: The facts that nodes compare their own data with.
        self.about_data: dict[str, int | str] = {
            "inputs": shape_to_json(dataset.shape),
            "classes": dataset.classes,
            "task": dataset.task,
        }
        self.use(config)
        #: Client -> the size that its node has named; empty: any size.
        self.sizes: dict[int, str] = {}
        #: Client -> the number of examples that its node has registered; not with [privacy].
        self.num_examples: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        #: Connected node -> its statement, in the order in which they came.
        self._statements: dict[int, Statement] = {}
        #: Client -> why the node with its key is not taken.
        self._refused: dict[int, str] = {}
        #: Unanswered questions, and the nodes that they went to.
        self._asked: dict[str, int] = {}
        #: Connected node -> when to ask it which client it is; infinity once it has said so.
        self._ask_at: dict[int, float] = {}
        self._printed: set[str] = set()

    def use(self, config: Config) -> None:
        """Set the configuration that nodes get with every message, without its paths."""
        self.config, self.text = config, to_text(config)

    def content(self, **values: int | str) -> ConfigRecord:
        """Return the record of a message: the run's configuration, and the given values."""
        return ConfigRecord({"config": self.text, **self.about_data, **values})

    def find(self, wanted: Collection[int], *, all_needed: bool = False) -> dict[int, int]:
        """Return the nodes of some clients; wait up to engine.flower.wait_s for missing ones.

        A client whose key was revoked, or whose node is refused, is not waited for, unless all
        clients are needed.
        """
        end = time.monotonic() + self.settings.wait_s
        self._ask_refused_again()
        while True:
            self._greet()
            self._assign()
            nodes = {client: self._nodes[client] for client in wanted if client in self._nodes}
            hopeless = set() if all_needed else {*self._refused, *self.revoked()}
            missing = set(wanted) - nodes.keys() - hopeless
            if not missing or time.monotonic() > end:
                return nodes
            time.sleep(POLL_S)

    def revoked(self) -> Collection[int]:
        """Return the clients whose keys were revoked."""
        return self.registrar.revoked() if self.registrar is not None else ()

    def why_absent(self, client: int) -> str:
        """Return why a client has no node."""
        if client in self.revoked():
            return REVOKED
        return self._refused.get(client, NOT_CONNECTED)

    def describe_refused(self, clients: Iterable[int]) -> str:
        """Return one sentence per client that has a node or a key that is not accepted."""
        reasons = [(client, self.why_absent(client)) for client in clients]
        known = [f" Client {client}: {why}" for client, why in reasons if why != NOT_CONNECTED]
        return "".join(known)

    def _ask_refused_again(self) -> None:
        """Let refused nodes be asked again: they may have been corrected since.

        A node with a key keeps its id when it restarts, so it may not be seen to leave.
        """
        if self.registrar is None:
            return
        for node in self._statements:
            is_refused = node not in self._nodes.values()
            if is_refused and node not in self._asked.values():
                self._ask_at[node] = 0.0

    def _greet(self) -> None:
        """Ask new nodes which client they are, read their answers, and forget nodes that left."""
        connected = set(self.grid.get_node_ids())
        for node in self._ask_at.keys() - connected:
            del self._ask_at[node]
            self._statements.pop(node, None)
        now = time.monotonic()
        for node in sorted(connected):
            if now < self._ask_at.get(node, 0.0):
                continue
            (sent,) = self.grid.push_messages(
                [
                    Message(
                        RecordDict({"job": self.content()}),
                        node,
                        MessageType.QUERY,
                        ttl=QUESTION_S,
                    )
                ]
            )
            self._asked[sent] = node
            self._ask_at[node] = now + ASK_AGAIN_S
        self._read_answers()

    def _read_answers(self) -> None:
        """Read the answers that have arrived to the question which client a node is."""
        for reply in self.answers.pull(list(self._asked)):
            if isinstance(reply, Refused):
                node = self._asked.pop(reply.sent)
                self._print_once(f"node {node} is left out: its answer was refused: {reply.reason}")
                continue
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                self._enter(node, reply)
            elif self._ask_at.get(node) == math.inf:
                pass  # it has answered another question; this one was lost on the way
            elif is_nodes_own(reply.error.reason):
                print(f"node {node} is left out: it {error_text(reply.error.reason)}", flush=True)
            else:
                # Flower's own error, for example because a busy machine took long to start the app.
                print(
                    f"node {node} is asked again: it {error_text(reply.error.reason)}", flush=True
                )
                if node in self._ask_at:
                    self._ask_at[node] = 0.0

    def _enter(self, node: int, reply: Message) -> None:
        """Keep a node's statement, if it makes sense."""
        if node not in self._ask_at:
            return  # it has left since
        try:
            answer = reply.content["node"]
            client, size = number(answer, "client"), str(answer["size"])
            registered = number(answer, "num_examples") if "num_examples" in answer else None
        except (KeyError, MotleyError) as error:
            self._print_once(f"node {node} is left out: it did not say which client it is: {error}")
            return
        clients = self.config.federation.clients
        if client >= clients:
            self._print_once(
                f"node {node} is left out: client = {client}, but there are {clients}."
            )
            return
        # A second answer of the same node keeps its place in the order.
        self._statements[node] = Statement(client, size, registered)
        self._ask_at[node] = math.inf

    def _assign(self) -> None:
        """Decide which node acts as which client."""
        if self.registrar is None:
            nodes = self._first_come()
        else:
            nodes = self._by_keys(self.registrar.clients_of(self._statements.keys()))
        for client, node in nodes.items():
            statement = self._statements[node]
            self.sizes[client] = statement.size
            if statement.num_examples is not None:
                self.num_examples[client] = statement.num_examples
        self._nodes = nodes

    def _by_keys(self, bound: Mapping[int, int | None]) -> dict[int, int]:
        """Return the nodes that state the client that their key is bound to."""
        nodes = {}
        self._refused = {}
        revoked = self.revoked()
        for node, statement in self._statements.items():
            if node not in bound:
                continue  # the next poll may know its key
            owner = bound[node]
            if owner in revoked:
                continue  # the server is about to disconnect it
            if owner == statement.client:
                nodes[owner] = node
                continue
            claim = f"it states that it is client {statement.client}"
            if owner is None:
                key = "its key is bound to no client"
            else:
                key = f"its key is bound to client {owner}"
                self._refused[owner] = f"its node is refused: {claim}."
            self._print_once(f"node {node} is refused: {claim}, but {key}.")
        return nodes

    def _first_come(self) -> dict[int, int]:
        """Return for every client the node that stated it first."""
        nodes: dict[int, int] = {}
        for node, statement in self._statements.items():
            first = nodes.setdefault(statement.client, node)
            if first != node:
                self._print_once(
                    f"node {node} is left out: it states that it is client {statement.client}, "
                    f"and so does node {first}, which came first. Without keys nobody can tell "
                    "which of them is right."
                )
        return nodes

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(text, flush=True)


def number(record: Any, name: str) -> int:
    """Return a whole number from a node's record."""
    value = record[name] if isinstance(record, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MotleyError(f"{name} = {value!r} should be a whole number.")
    return value
