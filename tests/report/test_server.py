"""The live page: three routes, this machine only, and a state that changes with the run."""

from __future__ import annotations

import http.client
import shutil
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.conftest import call

pytest.importorskip("plotly")
from motley.report.server import serve


@pytest.fixture
def served(runs: list[Path], tmp_path: Path) -> Iterator[tuple[ThreadingHTTPServer, Path]]:
    """Serve a copy of a run."""
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    server = serve(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, folder
    server.shutdown()
    server.server_close()


def request(
    server: ThreadingHTTPServer, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, str]:
    """Return the status and the content of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_the_page_and_its_script(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, _ = served
    status, page = request(server, "/")
    assert status == 200
    assert "data-live" in page
    assert len(page) < 1_000_000
    assert "Plotly" in request(server, "/plotly.js")[1]


@pytest.mark.parametrize(
    "path", ["/config.toml", "/../config.toml", "/%2e%2e/x", "//etc/passwd", "/checkpoints/"]
)
def test_no_path_reads_a_file(served: tuple[ThreadingHTTPServer, Path], path: str) -> None:
    assert request(served[0], path)[0] == 404


def test_the_server_is_read_only_and_local(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    assert request(server, "/", method="POST")[0] == 501
    assert request(server, "/", host="evil.example")[0] == 403


def test_a_new_round_changes_the_state(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, folder = served
    before = request(server, "/state")[1]
    assert request(server, "/state")[1] == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{")  # an incomplete line
    assert request(server, "/state")[1] != before
    assert request(server, "/")[0] == 200


def test_watch_reports_what_it_cannot_serve(
    tmp_path: Path, served: tuple[ThreadingHTTPServer, Path]
) -> None:
    assert "neither a run" in call("watch", tmp_path).err
    server, folder = served
    assert (
        f"--port {server.server_port}: cannot be used"
        in call("watch", folder, "--port", server.server_port).err
    )
