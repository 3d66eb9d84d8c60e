"""The live page: three answers, this machine only, and news as soon as there is some."""

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


def ask(server: ThreadingHTTPServer, path: str, method: str = "GET", host: str = "localhost") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_and_its_script(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, _ = served
    status, page = ask(server, "/")
    assert status == 200
    assert "data-live" in page
    assert len(page) < 1_000_000
    assert "Plotly" in ask(server, "/plotly.js")[1]


@pytest.mark.parametrize("path", ["/config.toml", "/../config.toml", "/%2e%2e/x", "//etc/passwd", "/checkpoints/"])
def test_no_path_leads_to_a_file(served: tuple[ThreadingHTTPServer, Path], path: str) -> None:
    assert ask(served[0], path)[0] == 404


def test_it_is_read_only_and_for_this_machine(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", host="evil.example")[0] == 403


def test_a_new_round_is_news(served: tuple[ThreadingHTTPServer, Path]) -> None:
    server, folder = served
    before = ask(server, "/state")[1]
    assert ask(server, "/state")[1] == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{")  # a line that is being written
    assert ask(server, "/state")[1] != before
    assert ask(server, "/")[0] == 200


def test_what_cannot_be_watched_is_said(tmp_path: Path, served: tuple[ThreadingHTTPServer, Path]) -> None:
    assert "neither a run" in call("watch", tmp_path).err
    server, folder = served
    assert f"--port {server.server_port}: cannot be used" in call("watch", folder, "--port", server.server_port).err
