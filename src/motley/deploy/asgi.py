"""Small parts of ASGI applications: reading a request, calling an application, refusing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class Captured:
    """An application's answer, before it is sent."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    async def take(self, event: MutableMapping[str, Any]) -> None:
        """Take a part of the answer, as the application's `send`."""
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event.get("headers", []))
        elif event["type"] == "http.response.body":
            self.body += event.get("body", b"")

    async def send(self, send: Send) -> None:
        """Send the answer."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request. A request that breaks off has none."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return b""
        body += event.get("body", b"")
        if not event.get("more_body", False):
            return bytes(body)


async def pass_on(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Let an application answer a request whose body was read."""
    bodies = [body]

    async def receive_again() -> MutableMapping[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await receive()

    await app(scope, receive_again, send)


async def call(app: App, scope: Scope, body: bytes) -> Captured:
    """Return an application's answer to a request, without sending it."""
    answer = Captured()

    async def receive_nothing() -> MutableMapping[str, Any]:
        return await asyncio.Future()  # cancelled when the application has answered

    await pass_on(app, scope, body, receive_nothing, answer.take)
    return answer


async def refuse(send: Send, status: int, reason: str) -> None:
    """Answer with a status and one line of text."""
    body = f"{reason}\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        # The rest of the request is not read.
        (b"connection", b"close"),
    ]
    await Captured(status, headers, body).send(send)
