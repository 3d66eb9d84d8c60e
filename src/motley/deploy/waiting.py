"""Lets nodes wait at the server for their next message.

Flower's SuperNode asks for a message and, if there is none, sleeps for three seconds before it asks
again. Here the answer "there is none" is held back for a while: if a run sends a message to the
node in the meantime, the SuperLink is asked once more, and the node has its message at once.

Flower hands a message out once. If the connection breaks at that moment, the message is lost, and
the run waits for an answer that never comes. So a message is kept here until the node confirms that
it has received all of it; a node that asks again instead gets it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PushObjectRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from google.protobuf.message import DecodeError

from motley.deploy.asgi import App, Captured, Receive, Scope, Send, call, pass_on, read_body

#: Seconds that a node waits at most. Its HTTP client gives up after 30 s.
HOLD_S = 20.0
#: Seconds between two looks at whether the server is about to stop.
LOOK_S = 0.5
#: Messages of runs that are remembered while they arrive; the oldest are forgotten.
MAX_UPLOADS = 1000
#: How often, and for how many seconds, a message is handed out again.
MAX_REPEATS, REPEAT_S = 3, 300.0


@dataclass
class HandedOut:
    """A message that a node has not confirmed."""

    number: str
    answer: Captured
    at: float
    repeats: int = 0


@dataclass
class Upload:
    """Messages that a run is sending: the pieces that are missing, and the nodes they go to."""

    missing: set[str]
    nodes: set[int]


@dataclass
class WaitingNodes:
    """The nodes that wait for a message."""

    app: App
    #: Whether the server is about to stop: then no request is held back any longer.
    stopping: Callable[[], bool] = lambda: False
    hold_s: float = HOLD_S
    #: Node -> set when there is a message for it. Only nodes that wait are in it.
    _news: dict[int, asyncio.Event] = field(default_factory=dict)
    #: Node -> how many messages were sent to it.
    _sent: Counter[int] = field(default_factory=Counter)
    #: Flower's number of an upload -> the messages.
    _uploads: dict[str, Upload] = field(default_factory=dict)
    _handed_out: dict[int, HandedOut] = field(default_factory=dict)

    # ---- requests of nodes

    async def pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a node's request for a message; wait for one if there is none."""
        body = await read_body(receive)
        try:
            node = PullMessagesRequest.FromString(body).node.node_id
        except DecodeError:
            await pass_on(self.app, scope, body, receive, send)  # Flower refuses it
            return
        sent_before = self._sent[node]
        # Flower checks the key, so a request that gets past this is from the node.
        answer = await call(self.app, scope, body)
        if is_empty(answer):
            answer = self._again(node) or answer
        if is_empty(answer) and await self._wait(node, sent_before, receive):
            # With the headers of the first request: Flower accepts a signature for five minutes.
            answer = await call(self.app, scope, body)
        if answer.status == 200 and answer.body:
            self._remember(node, answer)
        await answer.send(send)

    async def confirm(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forget a message that a node has received."""
        body = await read_body(receive)
        answer = await call(self.app, scope, body)
        if answer.status == 200:
            request = ConfirmMessageReceivedRequest.FromString(body)
            handed_out = self._handed_out.get(request.node.node_id)
            if handed_out is not None and handed_out.number == request.message_object_id:
                del self._handed_out[request.node.node_id]
        await answer.send(send)

    # ---- requests of runs

    async def note_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass messages from a run on, and wake their nodes when all pieces have arrived.

        A node that fetched a message before its pieces would sleep for a second or more.
        """
        body = await read_body(receive)
        answer = await call(self.app, scope, body)
        await answer.send(send)
        if answer.status != 200:
            return
        request = PushAppMessagesRequest.FromString(body)
        response = PushAppMessagesResponse.FromString(answer.body)
        nodes = {message.metadata.dst_node_id for message in request.messages_list}
        missing = set(response.objects_to_push)
        if missing:
            self._uploads[response.session_id] = Upload(missing, nodes)
            while len(self._uploads) > MAX_UPLOADS:
                del self._uploads[next(iter(self._uploads))]
        else:
            self._wake(nodes)

    async def note_piece(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a piece of a message from a run on."""
        body = await read_body(receive)
        answer = await call(self.app, scope, body)
        await answer.send(send)
        if answer.status != 200:
            return
        piece = PushObjectRequest.FromString(body)
        upload = self._uploads.get(piece.session_id)
        if upload is not None:
            upload.missing.discard(piece.object_id)
            if not upload.missing:
                del self._uploads[piece.session_id]
                self._wake(upload.nodes)

    # ----

    def _wake(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._sent[node] += 1
            if node in self._news:
                self._news[node].set()

    async def _wait(self, node: int, sent_before: int, receive: Receive) -> bool:
        """Wait for a message to a node; return whether there is one, and the node still waits.

        `sent_before` is the number of its messages before Flower was asked: one may have come
        between Flower's answer and this wait.
        """
        if node in self._news:  # an earlier request of the node waits no longer
            self._news[node].set()
        news = self._news[node] = asyncio.Event()
        if self._sent[node] != sent_before:
            news.set()
        left = asyncio.ensure_future(receive())  # ends when the node closes the connection
        try:
            end = time.monotonic() + self.hold_s
            while time.monotonic() < end and not self.stopping():
                come = asyncio.ensure_future(news.wait())
                await asyncio.wait(
                    {left, come}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                come.cancel()
                if left.done():
                    return False  # the node is gone, and must not be handed a message
                if news.is_set():
                    return True
            return False
        finally:
            left.cancel()
            if self._news.get(node) is news:
                del self._news[node]

    def _remember(self, node: int, answer: Captured) -> None:
        message = PullMessagesResponse.FromString(answer.body).messages_list[0]
        number = message.metadata.message_id
        earlier = self._handed_out.get(node)
        repeats = earlier.repeats + 1 if earlier and earlier.number == number else 0
        self._handed_out[node] = HandedOut(number, answer, time.monotonic(), repeats)

    def _again(self, node: int) -> Captured | None:
        """Return the last message of a node if it has not confirmed it."""
        handed_out = self._handed_out.get(node)
        if handed_out is None:
            return None
        if handed_out.repeats >= MAX_REPEATS or time.monotonic() - handed_out.at > REPEAT_S:
            del self._handed_out[node]
            return None
        return handed_out.answer


def is_empty(answer: Captured) -> bool:
    """Tell whether Flower has answered that there is no message."""
    return answer.status == 200 and not answer.body
