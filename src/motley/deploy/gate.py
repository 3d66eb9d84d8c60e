"""Lets requests for Flower's Fleet API through on the server's public address, and nothing else.

Flower 1.41 serves three APIs on one port. The Fleet API is for nodes, and checks their keys. The
Control API starts runs, with any code, and the Runtime API hands out their tasks; neither of the
two authenticates its callers. So the SuperLink listens on two sockets: one on loopback that serves
everything, and the public one behind this gate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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

#: Flower sends arrays in pieces of 5 MiB, so an honest request is far smaller than this.
MAX_REQUEST_BYTES = 32 * 2**20


class FleetGate:
    """An ASGI application that refuses everything but the Fleet API on the public socket."""

    def __init__(self, app: App, private: tuple[str, int], allowed: frozenset[str]) -> None:
        """`private` is the loopback address on which every request is passed on to `app`."""
        self.app = app
        self.private = private
        self.allowed = allowed

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
        await self.app({**scope, "headers": headers}, receive, send)

    def check(self, scope: Scope) -> tuple[int, str]:
        """Return the HTTP status and the reason for refusing a request; status 0 lets it pass."""
        # The address of the socket that was connected to: nothing in the request can change it.
        server = scope.get("server")
        if server is not None and tuple(server) == self.private:
            return 0, ""
        if scope["method"] != "POST" or scope["path"] not in self.allowed:
            return 404, "this address serves nodes only"
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        # Flower reads a whole request before it checks the key, so its length must be known first.
        if b"transfer-encoding" in headers or not length.isdigit():
            return 411, "a request needs a Content-Length"
        if int(length) > MAX_REQUEST_BYTES:
            return 413, f"a request has at most {MAX_REQUEST_BYTES} bytes"
        return 0, ""


async def refuse(send: Send, status: int, reason: str) -> None:
    """Answer with a status and one line of text."""
    body = f"{reason}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        # The rest of the request is not read.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
