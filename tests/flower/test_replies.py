"""The gate counts the pieces of answers, and refuses an answer that becomes too large."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import (
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node

from motley.deploy.gate import MAX_PIECES_AT_ONCE, NODE_PATHS, FleetGate
from motley.deploy.replies import OVERHEAD_BYTES, Replies

MIB = 2**20
PRIVATE, PUBLIC = ("127.0.0.1", 9001), ("10.0.0.1", 8443)
LIMIT = 2.0
REASON = "it has more than 2 MiB; engine.flower.max_reply_mib = 2."


class Flower:
    """The application behind the gate: it stores every piece."""

    def __init__(self) -> None:
        self.stored = 0
        self.hold: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        answer = b""
        if scope["path"] == "/v1/fleet/push-messages":
            answer = PushMessagesResponse(
                session_id="upload", objects_to_push=["root"]
            ).SerializeToString()
        if scope["path"] == "/v1/fleet/push-object":
            self.stored += len(PushObjectRequest.FromString(body).object_content)
            if self.hold:
                await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


async def by_header(headers: dict[bytes, bytes]) -> bytes | None:
    """Take the key from a header, unsigned."""
    return headers.get(b"key")


class Link:
    """A gate with an application, and requests to it."""

    def __init__(self) -> None:
        self.flower = Flower()
        self.gate = FleetGate(self.flower, PRIVATE, NODE_PATHS, Replies(lambda: LIMIT), by_header)
        self.read = 0

    async def ask(
        self, path: str, request: Any, server: Any = PUBLIC, key: bytes = b"node 1"
    ) -> tuple[int, str]:
        """Return the status and the text of the answer to a request."""
        body, events = request.SerializeToString(), []

        async def receive() -> Any:
            self.read += len(body)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event: Any) -> None:
            events.append(event)

        headers = [(b"content-length", str(len(body)).encode())]
        if key:
            headers.append((b"key", key))
        scope = {"type": "http", "method": "POST", "path": path, "server": server}
        await self.gate({**scope, "headers": headers}, receive, send)
        return events[0]["status"], events[1]["body"].decode(errors="replace").strip()

    async def announce(self, root: str = "root") -> None:
        tree = ObjectTree(object_id=root)
        await self.ask("/v1/fleet/push-messages", PushMessagesRequest(message_object_trees=[tree]))

    async def push(self, piece: str, size: int, upload: str = "upload", **more: Any) -> Any:
        request = PushObjectRequest(object_id=piece, object_content=b"x" * size, session_id=upload)
        return await self.ask("/v1/fleet/push-object", request, **more)


def test_pieces_are_stored_up_to_the_limit_and_the_run_is_told() -> None:
    async def play() -> None:
        link = Link()
        await link.announce()
        assert await link.push("1", MIB) == (200, "")
        assert await link.push("2", MIB) == (200, "")
        assert await link.push("2", MIB) == (200, "")  # sent again after a broken connection
        assert await link.push("3", OVERHEAD_BYTES + 1) == (413, REASON)
        assert await link.push("4", 1) == (413, REASON)
        assert link.flower.stored == 3 * MIB
        pull = PullObjectRequest(object_id="root")
        assert await link.ask("/v1/runtime/pull-object", pull, PRIVATE) == (413, REASON)
        other = PullObjectRequest(object_id="another answer")
        assert await link.ask("/v1/runtime/pull-object", other, PRIVATE) == (200, "")

    asyncio.run(play())


def test_pieces_that_nobody_has_announced_are_refused() -> None:
    async def play() -> None:
        link = Link()
        for upload in ("upload", ""):  # Flower would look an empty one up by the piece
            assert (await link.push("1", 1, upload))[0] == 413
        assert link.flower.stored == 0

    asyncio.run(play())


def test_a_strangers_piece_is_not_read() -> None:
    async def play() -> None:
        link = Link()
        await link.announce()
        read = link.read
        assert (await link.push("1", MIB, key=b""))[0] == 401
        assert link.read == read

    asyncio.run(play())


def test_a_node_sends_a_few_pieces_at_once() -> None:
    async def play() -> None:
        link = Link()
        await link.announce()
        link.flower.hold = asyncio.Event()
        pushes = [
            asyncio.ensure_future(link.push(str(number), 1)) for number in range(MAX_PIECES_AT_ONCE)
        ]
        await asyncio.sleep(0.05)
        assert (await link.push("more", 1))[0] == 503
        link.flower.hold.set()
        assert {status for status, _ in await asyncio.gather(*pushes)} == {200}
        assert (await link.push("more", 1))[0] == 200

    asyncio.run(play())


def test_a_node_answers_in_its_own_name_only() -> None:
    """Flower compares the key with the node of the request, but not with the sender of the message."""

    async def announce(sender: int) -> tuple[int, str]:
        request = PushMessagesRequest(node=Node(node_id=7))
        request.messages_list.append(Message(metadata=Metadata(src_node_id=sender)))
        return await Link().ask("/v1/fleet/push-messages", request)

    assert asyncio.run(announce(7))[0] == 200
    assert asyncio.run(announce(8)) == (403, "a node answers in its own name only")
