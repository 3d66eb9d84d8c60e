"""A grid without processes: every node is a call of the client app, and can misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from typing import Any

from flwr.app import Context, Message, RecordDict

from motley.config import Config, load_config
from motley.flower.client import NodeApp, build
from tests.conftest import TINY

Misdeed = Callable[[Message, Message], list[Message]]
"""Gets a message and the honest answer to it, and returns the answers to send instead.

An exception among its answers is raised by who pulls them; an event keeps who pulls them waiting until it is set.
"""
NEVER_S = 300.0
"""Longest wait in seconds: a test should fail and not hang."""


def three_nodes(*overrides: str) -> Config:
    """Return the tiny federation with three clients, one per size, all of them in every round."""
    clients = ("federation.clients=3", "federation.clients_per_round=3", "run.tensorboard=false")
    quick = ("engine.flower.wait_s=0.01", "engine.flower.timeout_s=0.05")
    return load_config(overrides=[*TINY, *clients, *quick, "engine.name=flower", *overrides])


def honest(sent: Message, reply: Message) -> list[Message]:
    """Answer as asked."""
    return [reply]


def in_round_1(misdeed: Misdeed) -> Misdeed:
    """Return a misdeed of round 1 only."""
    return lambda sent, reply: misdeed(sent, reply) if sent.metadata.group_id == "1" else [reply]


class Grid:
    """Takes the place of Flower's grid. `nodes` are the node.toml files by Flower id."""

    def __init__(self, nodes: dict[int, Path]) -> None:
        self.nodes = dict(nodes)
        self.misdeeds: dict[int, Misdeed] = {}
        """Flower id -> what the node does with messages of the type `misdeeds_with`."""
        self.misdeeds_with = "train"
        self.replies: dict[str, list[Message]] = {}
        self.sent = 0
        self.before: Callable[[Message], None] = lambda message: None
        #: False: a node answers every message as a new process would, and keeps nothing in between.
        self.keep_alive = True
        self._apps: dict[Path, NodeApp] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.before(message)
        self.sent += 1
        number, node = f"message-{self.sent}", message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = number
        self.replies[number] = []
        if node in self.nodes:
            act = (
                self.misdeeds.get(node, honest)
                if message.metadata.message_type == self.misdeeds_with
                else honest
            )
            self.replies[number] = act(message, self.answer(message))
        return number

    def answer(self, message: Message) -> Message:
        """Return what the node that a message goes to answers, if it is honest."""
        node = message.metadata.dst_node_id
        file = self.nodes[node]
        if file not in self._apps or not self.keep_alive:
            self._apps[file] = build()
        context = Context(1, node, {"motley": str(file)}, RecordDict(), {})
        return self._apps[file](message, context)

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        found: list[Any] = [reply for number in numbers for reply in self.replies.pop(number, [])]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, Event):
                reply.wait(NEVER_S)
        return [reply for reply in found if isinstance(reply, Message)]


def write_nodes(folder: Path, more: str = "") -> dict[int, Path]:
    """Write the files of three nodes that take their shares of the digits, and return them by Flower ids."""
    files = {}
    for client, size in enumerate(("resnet10", "resnet14", "resnet18")):
        file = folder / f"node-{client}" / "node.toml"
        file.parent.mkdir(parents=True)
        file.write_text(
            f'client = {client}\nsize = "{size}"\n{more}\n[data]\nname = "digits"\ndealt = true\n'
        )
        files[1000 - client] = file
    return files
