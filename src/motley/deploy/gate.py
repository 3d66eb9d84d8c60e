"""Lets requests for Flower's Fleet API through on the server's public address, and nothing else.

Flower 1.41 serves three APIs on one port. The Fleet API is for nodes, and checks their keys. The
Control API starts runs, with any code, and the Runtime API hands out their tasks; neither of the
two authenticates its callers. So the SuperLink listens on two sockets: one on loopback that serves
everything, and the public one behind this gate.

The gate does two more things that the SuperLink does not do itself:

- It limits the size of answers (replies.py), before the SuperLink stores them.
- It lets nodes wait for messages (waiting.py), which otherwise ask for one every three seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from google.protobuf.message import DecodeError

from motley.deploy.asgi import App, Receive, Scope, Send, call, pass_on, read_body, refuse
from motley.deploy.replies import Replies
from motley.deploy.waiting import WaitingNodes

#: The calls of a node with a registered key. Paths that a later version of Flower adds are refused.
NODE_PATHS = frozenset(
    {
        "/v1/fleet/activate-node",
        "/v1/fleet/deactivate-node",
        "/v1/fleet/send-node-heartbeat",
        "/v1/fleet/pull-messages",
        "/v1/fleet/push-messages",
        "/v1/fleet/get-run",
        "/v1/fleet/get-fab",
        "/v1/fleet/push-object",
        "/v1/fleet/pull-object",
        "/v1/fleet/confirm-message-received",
    }
)
#: Further calls of nodes without keys, which register themselves: for a federation on one machine.
SELF_REGISTRATION_PATHS = frozenset({"/v1/fleet/register-node", "/v1/fleet/unregister-node"})

PUSH_OBJECT = "/v1/fleet/push-object"
#: Flower sends arrays in pieces of 5 MiB, so an honest one is smaller than this.
MAX_PIECE_BYTES = 8 * 2**20
#: All other requests are short. The largest one announces an answer, with 66 bytes per piece.
MAX_REQUEST_BYTES = 2**20
#: Pieces of one node that are received at the same time. Flower's nodes send two.
MAX_PIECES_AT_ONCE = 8


class Authenticator(Protocol):
    """Tells which node has signed a request, from its headers alone."""

    async def __call__(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the public key of the registered node; None if there is none."""


async def _nobody(headers: dict[bytes, bytes]) -> bytes | None:
    return None


class FleetGate:
    """An ASGI application that refuses everything but the Fleet API on the public socket."""

    def __init__(
        self,
        app: App,
        private: tuple[str, int],
        allowed: frozenset[str],
        replies: Replies | None = None,
        authenticate: Authenticator = _nobody,
    ) -> None:
        """`private` is the loopback address on which every request is passed on to `app`."""
        self.app = app
        self.private = private
        self.allowed = allowed
        self.replies = replies or Replies(lambda: 0.0)
        self.authenticate = authenticate
        self.waiting = WaitingNodes(app)
        #: Public key -> pieces that are being received.
        self._pieces: dict[bytes, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are switched off")
        status, reason = self.check(scope)
        if status:
            await refuse(send, status, reason)
            return
        # Flower decides by `request.url` who has to authenticate. The URL is built from the Host
        # header, which the caller chooses, or without it from the socket's own address.
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        handler = self._handler(scope)
        try:
            await handler({**scope, "headers": headers}, receive, send)
        except asyncio.CancelledError:
            # A server that ends cancels requests that are still open, such as the one for a run's
            # output, which ends with the run. Without this, the server would log a traceback.
            if not self.waiting.stopping():
                raise

    def check(self, scope: Scope) -> tuple[int, str]:
        """Return the HTTP status and the reason for refusing a request; status 0 lets it pass."""
        if self.is_private(scope):
            return 0, ""
        if scope["method"] != "POST" or scope["path"] not in self.allowed:
            return 404, "this address serves nodes only"
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        # Flower reads a whole request before it checks the key, so its length must be known first.
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411, "a request needs a Content-Length"
        limit = MAX_PIECE_BYTES if scope["path"] == PUSH_OBJECT else MAX_REQUEST_BYTES
        if int(length) > limit:
            return 413, f"a request to {scope['path']} has at most {limit} bytes"
        return 0, ""

    def is_private(self, scope: Scope) -> bool:
        """Tell whether a request came over the private socket.

        That is the address of the socket that was connected to: nothing in the request changes it.
        """
        server = scope.get("server")
        return server is not None and tuple(server) == self.private

    def _handler(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        private_handlers = {
            "/v1/runtime/pull-object": self._let_run_pull_piece,
            "/v1/runtime/push-messages": self.waiting.note_messages,
            "/v1/runtime/push-object": self.waiting.note_piece,
        }
        public_handlers = {
            "/v1/fleet/pull-messages": self.waiting.pull,
            "/v1/fleet/confirm-message-received": self.waiting.confirm,
            "/v1/fleet/push-messages": self._announce,
            PUSH_OBJECT: self._receive_piece,
        }
        handlers = private_handlers if self.is_private(scope) else public_handlers
        return handlers.get(scope["path"], self.app)

    # ---- answers, from a node to the run

    async def _announce(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the announcement of an answer on, and record it if the SuperLink wants it."""
        body = await read_body(receive)
        if names_another_sender(body):
            await refuse(send, 403, "a node answers in its own name only")
            return
        answer = await call(self.app, scope, body)
        await answer.send(send)
        if answer.status != 200:
            return
        response = PushMessagesResponse.FromString(answer.body)
        # There are none if the SuperLink does not want the answer.
        if response.objects_to_push:
            for tree in PushMessagesRequest.FromString(body).message_object_trees[:1]:
                self.replies.announce(response.session_id, tree.object_id)

    async def _receive_piece(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive a piece of an answer that was announced, unless the answer is too large.

        The piece is not read before the key is checked, and only a few of each node at a time:
        neither a stranger nor a node can fill the memory with pieces.
        """
        key = await self.authenticate(dict(scope["headers"]))
        if key is None:
            await refuse(send, 401, "the request is not signed by a registered node")
            return
        if self._pieces.get(key, 0) >= MAX_PIECES_AT_ONCE:
            await refuse(send, 503, f"at most {MAX_PIECES_AT_ONCE} pieces at once")
            return
        self._pieces[key] = self._pieces.get(key, 0) + 1
        try:
            body = await read_body(receive)
            reason = self._refuse_piece(body)
            if reason:
                await refuse(send, 413, reason)
            else:
                await pass_on(self.app, scope, body, receive, send)
        finally:
            self._pieces[key] -= 1
            if not self._pieces[key]:
                del self._pieces[key]

    def _refuse_piece(self, body: bytes) -> str:
        try:
            piece = PushObjectRequest.FromString(body)
        except DecodeError:
            return "this is not a piece of an answer"
        return self.replies.add(piece.session_id, piece.object_id, len(piece.object_content))

    async def _let_run_pull_piece(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell a run that an answer was refused; it would wait for the rest of it."""
        body = await read_body(receive)
        try:
            reason = self.replies.refused.get(PullObjectRequest.FromString(body).object_id, "")
        except DecodeError:
            reason = ""  # Flower refuses it
        if reason:
            await refuse(send, 413, reason)
        else:
            await pass_on(self.app, scope, body, receive, send)


def names_another_sender(body: bytes) -> bool:
    """Tell whether an announced answer names another sender than the node that announces it.

    Flower compares the key with the node in the request, but not with the sender of the message.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False  # Flower refuses it
    senders = {message.metadata.src_node_id for message in request.messages_list}
    return bool(senders - {request.node.node_id})
