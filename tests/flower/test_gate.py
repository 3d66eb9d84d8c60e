"""Only nodes reach the public address, and only holders of a secret the APIs on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.main import create_app

from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.deploy.gate import (
    MAX_PIECE_BYTES,
    MAX_REQUEST_BYTES,
    NODE_PATHS,
    SELF_REGISTRATION_PATHS,
    FleetGate,
)
from motley.deploy.replies import Replies
from motley.deploy.superlink import superlink_config
from tests.flower.grid import three_nodes

PRIVATE, PUBLIC = ("127.0.0.1", 9001), ("10.0.0.1", 8443)


class Behind:
    """The application behind the gate; keeps the headers of each request that reached it."""

    def __init__(self) -> None:
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def everybody(headers: dict[bytes, bytes]) -> bytes:
    """Take every request for one that a registered node has signed."""
    return b"key"


def ask(
    path: str,
    server: tuple[str, int] | None = PUBLIC,
    method: str = "POST",
    headers: dict[bytes, bytes] | None = None,
) -> tuple[int, Behind]:
    """Send one request through the gate; return the status of the answer, and the application behind."""
    behind, sent = Behind(), []

    async def send(event: Any) -> None:
        sent.append(event)

    bodies = [b""]

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    given = {b"content-length": b"10"} if headers is None else headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "server": server,
        "headers": list(given.items()),
    }
    replies = Replies(lambda: 1.0)
    replies.announce("", "the answer")
    gate = FleetGate(behind, PRIVATE, NODE_PATHS, replies, everybody)
    gate.waiting.hold_s = 0.0
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"], behind


def test_the_public_address_serves_the_calls_of_nodes_and_none_of_flowers_other_ones() -> None:
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES}
    fleet = {path for path in paths if path.startswith("/v1/fleet/")}
    assert fleet == NODE_PATHS | SELF_REGISTRATION_PATHS
    for path in paths:
        status, behind = ask(path)
        expected = path in NODE_PATHS
        assert (status == 200, len(behind.headers)) == (expected, int(expected)), path


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/health",
        "/v1/fleet/../control/start-run",
        "//v1/fleet/get-run",
        "/v1/fleet/get-run/",
    ],
)
def test_paths_that_are_not_on_the_list_are_refused(path: str) -> None:
    assert ask(path)[0] == 404


def test_only_the_private_sockets_own_address_is_trusted() -> None:
    assert ask("/v1/control/start-run", server=PRIVATE)[0] == 200
    assert ask("/v1/control/start-run", server=("127.0.0.1", PUBLIC[1]))[0] == 404
    assert ask("/v1/control/start-run", server=None)[0] == 404
    told = {b"host": b"127.0.0.1:9001", b"x-forwarded-for": b"127.0.0.1", b"content-length": b"10"}
    assert ask("/v1/control/start-run", headers=told)[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({b"content-length": str(MAX_PIECE_BYTES).encode()}, 200),
        ({b"content-length": str(MAX_PIECE_BYTES + 1).encode()}, 413),
        ({b"content-length": b"-1"}, 411),
        ({b"transfer-encoding": b"chunked"}, 411),
        ({b"transfer-encoding": b"chunked", b"content-length": b"10"}, 411),
        ({}, 411),
    ],
)
def test_the_length_of_a_request_is_known_and_limited(
    headers: dict[bytes, bytes], status: int
) -> None:
    assert ask("/v1/fleet/push-object", headers=headers)[0] == status


def test_requests_other_than_pieces_of_answers_are_short() -> None:
    for path in NODE_PATHS - {"/v1/fleet/push-object"}:
        for size, status in ((MAX_REQUEST_BYTES, 200), (MAX_REQUEST_BYTES + 1, 413)):
            headers = {b"content-length": str(size).encode()}
            assert ask(path, headers=headers)[0] == status, path


def test_the_host_header_does_not_get_through() -> None:
    """Flower builds a URL from it and decides by that URL which requests need a key."""
    _, behind = ask(
        "/v1/fleet/get-run",
        headers={b"host": b"x/health?", b"content-length": b"1", b"accept": b"*/*"},
    )
    assert behind.headers == [{b"content-length": b"1", b"accept": b"*/*"}]


# ---- with Flower's own application behind the gate


@pytest.mark.parametrize("stopping", [True, False])
def test_a_request_that_a_server_cancels_as_it_ends_is_no_error(stopping: bool) -> None:
    """The request for a run's output is open as long as the run."""

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def cancel() -> bool:
        gate = FleetGate(never, PRIVATE, NODE_PATHS)
        gate.waiting.stopping = lambda: stopping
        scope = {"type": "http", "method": "POST", "path": "/v1/control/stream-logs"}
        request = asyncio.ensure_future(
            gate({**scope, "server": PRIVATE, "headers": []}, None, None)  # type: ignore[arg-type]
        )
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait({request})
        return request.cancelled()

    assert asyncio.run(cancel()) != stopping


@pytest.fixture
def folder(tmp_path: Path) -> DeployFolder:
    made = create(tmp_path / "fed", three_nodes(), DeploySettings())
    made.write_secrets(f"{PRIVATE[0]}:{PRIVATE[1]}")
    return made


def test_on_loopback_each_api_wants_its_own_proof(folder: DeployFolder) -> None:
    app = create_app(superlink_config(folder, PRIVATE), SuperLinkLifespan)
    transport = httpx.ASGITransport(app=FleetGate(app, PRIVATE, NODE_PATHS))

    async def post(path: str, headers: dict[str, str]) -> int:
        async with httpx.AsyncClient(
            transport=transport, base_url=f"https://{PRIVATE[0]}:{PRIVATE[1]}"
        ) as client:
            answer = await client.post(
                path, headers=headers, content=ListNodesRequest().SerializeToString()
            )
        return answer.status_code

    def status(path: str, **headers: str) -> int:
        return asyncio.run(post(path, {"content-type": PROTOBUF_MEDIA_TYPE, **headers}))

    token = folder.read_secrets().token
    assert status("/v1/control/list-nodes") == 401
    assert status("/v1/control/list-nodes", authorization=f"Bearer {token[:-1]}") == 401
    assert status("/v1/control/list-nodes", authorization=f"Bearer {token}") == 200
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"):
        assert status(path) == 401, path
    for path in NODE_PATHS:
        assert status(path) == 401, path
