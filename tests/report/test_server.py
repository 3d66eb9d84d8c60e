"""The live page: three routes, this machine only, and a state that changes with the run."""

from __future__ import annotations

import http.client
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import call

pytest.importorskip("plotly")
from motley.report import server as server_module
from motley.report.server import ReportServer, serve


@pytest.fixture
def served(runs: list[Path], tmp_path: Path) -> Iterator[tuple[ReportServer, Path]]:
    """Serve a copy of a run."""
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    server = serve(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, folder
    server.shutdown()
    server.server_close()


def request(
    server: ReportServer, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, str]:
    """Return the status and the content of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_the_page_and_its_script(served: tuple[ReportServer, Path]) -> None:
    server, _ = served
    status, page = request(server, "/")
    assert status == 200
    assert "data-live" in page
    assert len(page) < 1_000_000
    assert "Plotly" in request(server, "/plotly.js")[1]


@pytest.mark.parametrize(
    "path", ["/config.toml", "/../config.toml", "/%2e%2e/x", "//etc/passwd", "/checkpoints/"]
)
def test_no_path_reads_a_file(served: tuple[ReportServer, Path], path: str) -> None:
    assert request(served[0], path)[0] == 404


def test_the_server_is_read_only_and_local(served: tuple[ReportServer, Path]) -> None:
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    assert request(server, "/", method="POST")[0] == 405
    assert request(server, "/", host="evil.example")[0] == 403


def exchange(server: ReportServer, raw: bytes) -> str:
    """Send bytes and return all that comes back."""
    with socket.create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(raw)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_many_half_open_requests_hold_up_nothing(served: tuple[ReportServer, Path]) -> None:
    server, _ = served
    threads = threading.active_count()
    half_open = []
    try:
        for number in range(600):
            connection = socket.create_connection(server.server_address, timeout=30)
            half_open.append(connection)
            # Some have sent nothing, some a part of a request.
            with suppress(OSError):  # those that were closed to make room for others
                connection.sendall(b"GET / HTTP/1.1\r\nHost: loc"[: number % 25])
        assert request(server, "/state")[0] == 200
        assert request(server, "/")[0] == 200
        assert threading.active_count() <= threads + 1  # the one that makes pages
        assert len(server._connections) <= server_module.MAX_CONNECTIONS
    finally:
        for connection in half_open:
            connection.close()
    assert request(server, "/state")[0] == 200


def test_a_request_must_arrive_in_time(
    served: tuple[ReportServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.2)
    for start in (b"", b"GET / HTTP/1.1\r\n"):
        with suppress(ConnectionResetError):
            assert exchange(served[0], start) == ""


def test_a_response_must_be_taken_in_time(
    served: tuple[ReportServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.2)
    with socket.create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(b"GET /plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 20
        while not server._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        while server._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server._connections


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000, 431),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"\xff\x00\x01\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /?x HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1@evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 403),
    ],
)
def test_other_requests_are_refused(
    served: tuple[ReportServer, Path], raw: bytes, status: int
) -> None:
    answer = exchange(served[0], raw)
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert "X-Content-Type-Options: nosniff" in answer and "html" not in answer


@pytest.mark.parametrize("path", ["/", "/state", "/plotly.js"])
def test_responses_have_headers_for_safety(served: tuple[ReportServer, Path], path: str) -> None:
    server, _ = served
    host = f"LocalHost:{server.server_port}"
    answer = exchange(server, f"HEAD {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, content = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK") and not content
    length = int(head.partition("Content-Length: ")[2].split()[0])
    assert length == len(request(server, path)[1].encode())
    assert "Cache-Control: no-store" in head and "X-Frame-Options: DENY" in head
    policy = head.partition("Content-Security-Policy: ")[2].splitlines()[0]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_a_page_that_cannot_be_made_is_a_message(served: tuple[ReportServer, Path]) -> None:
    server, folder = served
    (folder / "config.toml").write_text("<script>[")
    status, content = request(server, "/")
    assert status == 500 and "config.toml: is not valid TOML" in content
    answer = exchange(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "Content-Type: text/plain" in answer


def test_a_new_round_changes_the_state(served: tuple[ReportServer, Path]) -> None:
    server, folder = served
    before = request(server, "/state")[1]
    assert request(server, "/state")[1] == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{")  # an incomplete line
    assert request(server, "/state")[1] != before
    assert request(server, "/")[0] == 200


def test_watch_reports_what_it_cannot_serve(
    tmp_path: Path, served: tuple[ReportServer, Path]
) -> None:
    assert "neither a run" in call("watch", tmp_path).err
    server, folder = served
    assert (
        f"--port {server.server_port}: cannot be used"
        in call("watch", folder, "--port", server.server_port).err
    )
