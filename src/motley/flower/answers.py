"""Receives answers, so that neither an incomplete nor an oversized answer harms the others.

A node announces an answer before it sends it. Flower's own pull waits from then on for all of it:
for minutes if the node dies in between, and longer if the node is malicious. It also keeps
everything that arrives, before anybody can see how large it is. So answers from a SuperLink are
pulled piece by piece here (`PiecewiseAnswers`): a piece that is not there yet is asked for again
later, and an answer that is larger than allowed is dropped at the piece that exceeds the limit.

Other grids (Flower's simulation) are pulled with Flower's own function, in threads (`Answers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

#: Seconds that one pull may delay the others.
HOLD_S = 1.0
#: The HTTP status with which the gate (deploy/gate.py) answers for a message that it has refused.
TOO_LARGE = 413

Pull = Future[list[Message]]


@dataclass(frozen=True)
class Refused:
    """An answer that is not read. `sent` is the message that it answers."""

    sent: str
    reason: str


def answers_from(grid: Grid, max_bytes: float) -> Answers | PiecewiseAnswers:
    """Return the receiver of the answers that come over a grid."""
    if isinstance(grid, HttpGrid):
        return PiecewiseAnswers(grid, max_bytes)
    return Answers(grid)


# ---- from a SuperLink


class PiecewiseAnswers:
    """Receives the answers to messages from a SuperLink. No call waits for a node."""

    def __init__(self, grid: HttpGrid, max_bytes: float) -> None:
        """`max_bytes` is the largest answer that is read."""
        self.grid, self.max_bytes = grid, max_bytes
        #: Message -> the answer that was announced for it.
        self._begun: dict[str, PartialAnswer] = {}

    def pull(self, numbers: Iterable[str]) -> Iterator[Message | Refused]:
        """Return the answers to some messages that have arrived, at most one per message.

        They are pulled one by one, so that an answer that cannot be read affects no other.
        """
        for sent in numbers:
            try:
                answer = self._pull(sent)
            except RefusedError as error:
                self._drop(sent)
                yield Refused(sent, str(error))
            except (httpx.HTTPStatusError, KeyError, TypeError, ValueError, IndexError) as error:
                print(f"an answer could not be read: {error!r}", flush=True)
                self._drop(sent)
                yield Refused(sent, "it cannot be read.")
            else:
                if answer is not None:
                    self._begun.pop(sent)
                    yield answer

    def give_up(self, sent: str) -> bool:
        """Ignore the answer to a message from now on; return whether it had been announced."""
        announced = sent in self._begun
        self._drop(sent)
        return announced

    @property
    def _client(self) -> Any:
        # Flower has no public way to pull a part of an answer. The version of Flower is pinned.
        return self.grid._runtime_client

    def _pull(self, sent: str) -> Message | None:
        """Return an answer if all of it has arrived."""
        if sent not in self._begun:
            response = self._client.PullMessages(PullAppMessagesRequest(message_ids=[sent]))
            for message, tree in zip(
                response.messages_list, response.message_object_trees, strict=True
            ):
                if message.metadata.reply_to_message_id == sent:
                    number = message.metadata.message_id
                    self._begun[sent] = PartialAnswer(number, missing_pieces(tree))
        answer = self._begun.get(sent)
        if answer is None or not self._complete(answer):
            return None
        answer.check(self.max_bytes)
        message = cast(Message, inflate_object_from_contents(answer.number, answer.pieces))
        message.metadata.__dict__["_message_id"] = answer.number
        self._confirm(answer)
        # The announcement and the answer itself are separate, and a node may make them differ.
        if message.metadata.reply_to_message_id != sent:
            raise ValueError("it answers another message than it was announced for")
        return message

    def _complete(self, answer: PartialAnswer) -> bool:
        """Pull the pieces that are there; return whether none is missing."""
        while answer.missing:
            request = PullObjectRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, object_id=answer.missing[0]
            )
            try:
                response = self._client.PullObject(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == TOO_LARGE:
                    raise RefusedError(error.response.text.strip()) from None
                raise
            if not response.object_found:
                raise RefusedError(
                    "the node announced it, and did not send all of it within three minutes."
                )
            if not response.object_available:
                return False
            answer.add(response.object_content, self.max_bytes)
        return True

    def _drop(self, sent: str) -> None:
        answer = self._begun.pop(sent, None)
        if answer is not None:
            self._confirm(answer)

    def _confirm(self, answer: PartialAnswer) -> None:
        """Let the SuperLink delete an answer."""
        try:
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self.grid.node,
                    run_id=self.grid.run.run_id,
                    message_object_id=answer.number,
                )
            )
        except httpx.HTTPStatusError as error:
            print(f"an answer could not be deleted: {error!r}", flush=True)


class RefusedError(Exception):
    """An answer is larger than allowed, or was not sent in full; the text is the reason."""


@dataclass
class PartialAnswer:
    """The pieces of an answer that have arrived, and the ids of those that have not."""

    number: str
    missing: list[str]
    pieces: dict[str, bytes] = field(default_factory=dict)

    def add(self, content: bytes, max_bytes: float) -> None:
        """Keep the first missing piece, unless the answer would become too large."""
        size = len(content) + sum(map(len, self.pieces.values()))
        if size > max_bytes:
            raise RefusedError(too_large(max_bytes))
        self.pieces[self.missing.pop(0)] = content

    def check(self, max_bytes: float) -> None:
        """Raise if the arrays would be too large. An array may name one piece many times."""
        size = 0
        for content in self.pieces.values():
            object_type, children, _ = get_object_head_values_from_object_content(content)
            if object_type == Array.__qualname__:
                chosen = json.loads(get_object_body(content, Array))["arraychunk_ids"]
                size += sum(len(self.pieces[children[index]]) for index in chosen)
        if size > max_bytes:
            raise RefusedError(too_large(max_bytes))


def too_large(max_bytes: float) -> str:
    """Return the reason for refusing an answer."""
    limit = max_bytes / 2**20
    return f"it has more than {limit:g} MiB; engine.flower.max_reply_mib = {limit:g}."


def missing_pieces(tree: ObjectTree) -> list[str]:
    """Return the ids of an answer's pieces, the message itself first.

    Nodes send it last, so one request tells whether an answer is there.
    """
    pieces = [piece.object_id for piece in iterate_object_tree(tree)]
    return list(dict.fromkeys(reversed(pieces)))


# ---- from any grid


class Answers:
    """Receives the answers to messages as they arrive."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        #: Message -> the pull of its answer that took too long, which goes on in a thread.
        self._begun: dict[str, Pull] = {}

    def pull(self, numbers: Iterable[str]) -> Iterator[Message]:
        """Return the answers to some messages that have arrived, at most one per message.

        They are pulled one by one, so that an answer that cannot be read affects no other.
        """
        thread = PullThread(self.grid)
        try:
            for sent in numbers:
                if sent not in self._begun:
                    self._begun[sent] = thread.pull(sent)
                    if not self._begun[sent].done():
                        thread.dismiss()
                        thread = PullThread(self.grid)
                if self._begun[sent].done():
                    yield from read(sent, self._begun.pop(sent))
        finally:
            thread.dismiss()

    def give_up(self, sent: str) -> bool:
        """Ignore the answer to a message from now on; return whether it had been announced."""
        return self._begun.pop(sent, None) is not None


class PullThread:
    """Pulls one answer after another until it is dismissed. The process can end without it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._tasks: SimpleQueue[tuple[str, Pull] | None] = SimpleQueue()
        Thread(target=self._work, name="pull", daemon=True).start()

    def pull(self, sent: str) -> Pull:
        """Start to pull an answer, and wait for it for a moment."""
        pull: Pull = Future()
        self._tasks.put((sent, pull))
        wait([pull], HOLD_S)
        return pull

    def dismiss(self) -> None:
        """End the thread after its present task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            sent, pull = task
            try:
                pull.set_result(list(self.grid.pull_messages([sent])))
            except BaseException as error:  # Flower stops runs with SystemExit
                pull.set_exception(error)


def read(sent: str, pull: Pull) -> list[Message]:
    """Return the answer that a finished pull has received, if there is one."""
    try:
        replies = pull.result()
    except Exception as error:
        print(f"an answer could not be read: {error!r}", flush=True)
        return []
    return [reply for reply in replies if reply.metadata.reply_to_message_id == sent][:1]
