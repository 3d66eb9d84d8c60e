"""The server's side of Flower: sends jobs to nodes as messages, and reads their answers as updates.

A node is identified by the client number that it states; its Flower id may change whenever it
restarts. An answer counts if it arrives in time, from the node that was asked, in reply to its
message, and for the current round. Everything else is a failure with a reason, and the round goes
on without that client.
"""

from __future__ import annotations

import time
from collections.abc import Collection as Some
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from motley.client.job import Job
from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.data import Dataset
from motley.engine.base import Done, Failure
from motley.flower.answers import Answers
from motley.flower.arrays import pack, size_in_bytes, unpack
from motley.flower.failures import is_nodes_own, told
from motley.flower.run_config import to_text
from motley.methods.base import Collection
from motley.models.inputs import shape_to_json

COLLECT = f"{MessageType.TRAIN}.collect"
#: Longest pause between two polls for answers, in seconds; every poll is one request per answer.
POLL_S = 1.0
#: A message lives this many seconds longer than the server waits for its answer. Otherwise Flower
#: would report that it is too old, which says less than the server's own message.
GRACE_S = 10.0
#: The first pause in seconds, and the factor of every later one: simulated nodes answer at once.
FIRST_S, LONGER = 0.05, 1.5


class Nodes:
    """The connected nodes, by client."""

    def __init__(self, grid: Grid, config: Config, dataset: Dataset) -> None:
        self.grid, self.answers, self.settings = grid, Answers(grid), config.engine.flower
        #: What nodes check their own data against.
        self.about_data: dict[str, int | str] = {
            "inputs": shape_to_json(dataset.shape),
            "classes": dataset.classes,
            "task": dataset.task,
        }
        self.use(config)
        #: Client -> the size that its node has named; empty: any size.
        self.sizes: dict[int, str] = {}
        self._nodes: dict[int, int] = {}
        #: Unanswered queries, and the nodes that they went to.
        self._asked: dict[str, int] = {}
        self._met: set[int] = set()

    def use(self, config: Config) -> None:
        """Set the configuration that nodes get with every message, without its paths."""
        self.config, self.text = config, to_text(config)

    def content(self, **values: int | str) -> ConfigRecord:
        """Return the record of a message: the run's configuration, and the given values."""
        return ConfigRecord({"config": self.text, **self.about_data, **values})

    def find(self, wanted: Some[int]) -> dict[int, int]:
        """Return the nodes of some clients; wait up to engine.flower.wait_s for missing ones."""
        end = time.monotonic() + self.settings.wait_s
        while True:
            self._greet()
            nodes = {client: self._nodes[client] for client in wanted if client in self._nodes}
            if len(nodes) == len(wanted) or time.monotonic() > end:
                return nodes
            time.sleep(POLL_S)

    def _greet(self) -> None:
        """Ask new nodes which client they are, read their answers, and forget nodes that left."""
        connected = set(self.grid.get_node_ids())
        self._nodes = {client: node for client, node in self._nodes.items() if node in connected}
        new = sorted(connected - self._met)
        self._met = connected
        for node in new:
            (number,) = self.grid.push_messages(
                [Message(RecordDict({"job": self.content()}), node, MessageType.QUERY)]
            )
            self._asked[number] = node
        for reply in self.answers.pull(list(self._asked)):
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                self._enter(node, reply)
            elif is_nodes_own(reply.error.reason):
                print(f"node {node} is left out: it {told(reply.error.reason)}", flush=True)
            else:
                # Flower's own error, for example because a busy machine took long to start the app.
                print(f"node {node} is asked again: it {told(reply.error.reason)}", flush=True)
                self._met.discard(node)

    def _enter(self, node: int, reply: Message) -> None:
        try:
            answer = reply.content["node"]
            client, size = number(answer, "client"), str(answer["size"])
        except (KeyError, MotleyError) as error:
            print(
                f"node {node} is left out: it did not say which client it is: {error}", flush=True
            )
            return
        clients = self.config.federation.clients
        if client >= clients:
            print(
                f"node {node} is left out: client = {client}, but there are {clients}.", flush=True
            )
            return
        self._nodes[client], self.sizes[client] = node, size


class FlowerEngine:
    """Runs clients at their nodes."""

    trusted: ClassVar[bool] = False

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.grid = nodes, nodes.grid
        self.answers, self.settings = nodes.answers, nodes.settings
        self._forget: dict[int, int] = {}

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        """Send every job to its client's node; return updates and failures, ordered by client."""
        answers: list[ClientUpdate | Failure] = []
        for job, answer in self._ask(jobs, MessageType.TRAIN):
            if isinstance(answer, ClientUpdate) and answer.num_examples and not answer.num_steps:
                answer = Failure(job.client, "it claims to have trained in no steps.")
            if isinstance(answer, Failure) or answer.num_examples:
                answers.append(answer)
            done(job.client)
        return sorted(answers, key=lambda answer: answer.client)

    def collect(self, jobs: Sequence[Job]) -> list[Collection | Failure]:
        """Ask for collections; return collections and failures, ordered by client."""
        answers: list[Collection | Failure] = []
        for job, answer in self._ask(jobs, COLLECT):
            if isinstance(answer, Failure):
                answers.append(answer)
            elif answer.num_examples:
                answers.append(
                    Collection(
                        job.client, answer.num_examples, answer.payload, job.size, job.round_number
                    )
                )
        return sorted(answers, key=lambda answer: answer.client)

    def save_memory(self, rounds: dict[int, int]) -> None:
        """Do nothing: a node saves its client's state before it answers."""

    def forget_memory(self, rounds: dict[int, int]) -> None:
        """Tell each node with its next job which client states are no longer needed."""
        self._forget = rounds

    def _ask(
        self, jobs: Sequence[Job], message_type: str
    ) -> Iterator[tuple[Job, ClientUpdate | Failure]]:
        """Send jobs; yield each with its answer as it arrives, or with the reason for a failure."""
        nodes = self.nodes.find([job.client for job in jobs])
        for job in jobs:
            if job.client not in nodes:
                yield job, Failure(job.client, "its node is not connected.")
        asked = [job for job in jobs if job.client in nodes]
        numbers = self.grid.push_messages(
            [self._message(job, nodes[job.client], message_type) for job in asked]
        )
        waiting = dict(zip(numbers, asked, strict=True))
        end, pause = time.monotonic() + self.settings.timeout_s, FIRST_S
        while waiting:
            for reply in self.answers.pull(list(waiting)):
                job = waiting.pop(reply.metadata.reply_to_message_id)
                yield job, self._answer(job, reply)
            if time.monotonic() > end:
                break
            time.sleep(min(pause, POLL_S) if waiting else 0)
            pause *= LONGER
        for sent, job in waiting.items():
            fault = (
                "announced an answer that did not come whole"
                if self.answers.give_up(sent)
                else "did not answer"
            )
            yield job, Failure(job.client, f"it {fault} within {self.settings.timeout_s:g} s.")

    def _message(self, job: Job, node: int, message_type: str) -> Message:
        about = self.nodes.content(
            round=job.round_number,
            client=job.client,
            size=job.size,
            client_state_round=-1 if job.client_state_round is None else job.client_state_round,
            forget=self._forget.get(job.client, 0),
            collection=job.collection,
        )
        content = RecordDict(
            {"job": about, "arrays": pack(state=job.state, broadcast=job.broadcast)}
        )
        return Message(
            content,
            node,
            message_type,
            ttl=self.settings.timeout_s + GRACE_S,
            group_id=str(job.round_number),
        )

    def _answer(self, job: Job, reply: Message) -> ClientUpdate | Failure:
        """Return the update in a reply, or the reason why it cannot be used."""
        if reply.has_error():
            return Failure(job.client, f"its node {told(reply.error.reason)}")
        try:
            return self._update(job, reply.content)
        except (MotleyError, KeyError, TypeError, ValueError) as error:
            return Failure(job.client, f"its answer was refused: {error}")

    def _update(self, job: Job, content: RecordDict) -> ClientUpdate:
        about: Any = content["update"]
        arrays: Any = content["arrays"]
        for name, expected in (("client", job.client), ("round", job.round_number)):
            if (given := number(about, name)) != expected:
                raise MotleyError(f"it is for {name} {given}; {name} {expected} was asked.")
        size = size_in_bytes(arrays) / 2**20
        limit = self.settings.max_reply_mib
        if size > limit:
            raise MotleyError(f"it has {size:.1f} MiB; engine.flower.max_reply_mib = {limit:g}.")
        return ClientUpdate(
            client=job.client,
            delta=unpack(arrays, "delta"),
            payload=unpack(arrays, "payload"),
            num_examples=number(about, "num_examples"),
            num_steps=number(about, "num_steps"),
            loss=torch.tensor(float(about["loss"])),
        )


def number(record: Any, name: str) -> int:
    """Return a whole number from a node's record."""
    value = record[name] if isinstance(record, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MotleyError(f"{name} = {value!r} should be a whole number.")
    return value
