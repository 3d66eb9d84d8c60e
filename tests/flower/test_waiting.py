"""Nodes wait at the gate for messages, and a message that is lost on the way is handed out again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse

from motley.deploy.gate import NODE_PATHS, FleetGate

PRIVATE, PUBLIC = ("127.0.0.1", 9001), ("10.0.0.1", 8443)
NODE = Node(node_id=5)


class Flower:
    """The application behind the gate: hands every message out once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.pieces: list[str] = []
        self.asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        answer = b""
        if scope["path"] == "/v1/fleet/pull-messages":
            self.asked += 1
            if self.messages:
                message = Message(metadata=Metadata(message_id=self.messages.pop(0)))
                answer = PullMessagesResponse(messages_list=[message]).SerializeToString()
        if scope["path"] == "/v1/runtime/push-messages":
            for message in PushAppMessagesRequest.FromString(body).messages_list:
                self.messages.append(message.metadata.message_id)
            answer = PushAppMessagesResponse(
                session_id="upload", objects_to_push=self.pieces
            ).SerializeToString()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


class Link:
    """A gate, with the requests of a node and of a run."""

    def __init__(self) -> None:
        self.flower = Flower()
        self.gate = FleetGate(self.flower, PRIVATE, NODE_PATHS)
        self.gate.waiting.hold_s = 5.0
        self.left = asyncio.Event()

    async def ask(self, path: str, request: Any, server: Any = PUBLIC) -> bytes:
        body, answer = request.SerializeToString(), []
        bodies = [body]

        async def receive() -> Any:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            answer.append(event.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": path, "server": server}
        headers = [(b"content-length", str(len(body)).encode())]
        await self.gate({**scope, "headers": headers}, receive, send)
        return b"".join(answer)

    async def pull(self) -> str:
        """Return the number of the node's next message; empty if there is none."""
        body = await self.ask("/v1/fleet/pull-messages", PullMessagesRequest(node=NODE))
        messages = PullMessagesResponse.FromString(body).messages_list
        return messages[0].metadata.message_id if messages else ""

    async def confirm(self, number: str) -> None:
        request = ConfirmMessageReceivedRequest(node=NODE, message_object_id=number)
        await self.ask("/v1/fleet/confirm-message-received", request)

    async def send(self, number: str, node: int = NODE.node_id) -> None:
        message = Message(metadata=Metadata(message_id=number, dst_node_id=node))
        request = PushAppMessagesRequest(messages_list=[message])
        await self.ask("/v1/runtime/push-messages", request, PRIVATE)

    async def send_piece(self, piece: str) -> None:
        request = PushObjectRequest(session_id="upload", object_id=piece)
        await self.ask("/v1/runtime/push-object", request, PRIVATE)


def play(test: Coroutine[Any, Any, None]) -> float:
    """Run a test; return how many seconds it took."""
    begun = time.monotonic()
    asyncio.run(test)
    return time.monotonic() - begun


def test_a_waiting_node_gets_its_message_at_once_when_all_pieces_are_there() -> None:
    async def test() -> None:
        link = Link()
        link.flower.pieces = ["1", "2"]
        pull = asyncio.ensure_future(link.pull())
        await asyncio.sleep(0.05)
        await link.send("message")
        await link.send_piece("1")
        await asyncio.sleep(0.05)
        assert not pull.done()
        await link.send_piece("2")
        assert await pull == "message"
        assert link.flower.asked == 2

    assert play(test()) < 2.0


def test_a_message_to_another_node_wakes_nobody_and_a_wait_ends() -> None:
    async def test() -> None:
        link = Link()
        link.gate.waiting.hold_s = 0.3
        pull = asyncio.ensure_future(link.pull())
        await asyncio.sleep(0.05)
        await link.send("message", node=6)
        link.flower.messages.clear()
        assert await pull == "" and link.flower.asked == 1

    assert 0.3 <= play(test()) < 2.0


def test_a_message_that_comes_while_flower_answers_is_not_missed() -> None:
    async def test() -> None:
        link = Link()
        flower = link.flower.__call__

        async def answer_late(scope: Any, receive: Any, send: Any) -> None:
            """Answer that there is no message, while one is stored."""
            await flower(scope, receive, send)
            if scope["path"] == "/v1/fleet/pull-messages" and link.flower.asked == 1:
                await link.send("message")

        link.gate.waiting.app = answer_late
        assert await link.pull() == "message"

    assert play(test()) < 2.0


def test_nobody_waits_when_the_server_stops() -> None:
    async def test() -> None:
        link = Link()
        pull = asyncio.ensure_future(link.pull())
        await asyncio.sleep(0.05)
        link.gate.waiting.stopping = lambda: True
        assert await pull == ""

    assert play(test()) < 2.0


def test_a_node_that_has_left_is_handed_no_message() -> None:
    async def test() -> None:
        link = Link()
        pull = asyncio.ensure_future(link.pull())
        await asyncio.sleep(0.05)
        link.left.set()
        await pull
        await link.send("message")
        assert link.flower.messages == ["message"]

    assert play(test()) < 2.0


def test_a_message_that_was_not_confirmed_is_handed_out_again() -> None:
    async def test() -> None:
        link = Link()
        await link.send("message")
        assert [await link.pull() for _ in range(3)] == ["message"] * 3
        await link.confirm("another")
        assert await link.pull() == "message"
        await link.send("next")
        assert await link.pull() == "next"  # a new message comes first
        await link.confirm("next")
        link.gate.waiting.hold_s = 0.0
        assert await link.pull() == ""

    assert play(test()) < 2.0


def test_a_message_is_not_handed_out_for_ever() -> None:
    async def test() -> None:
        link = Link()
        link.gate.waiting.hold_s = 0.0
        await link.send("message")
        assert [await link.pull() for _ in range(6)] == ["message"] * 4 + ["", ""]

    assert play(test()) < 2.0
