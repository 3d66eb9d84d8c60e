"""The report as a live page: read-only, on this machine only, and nothing but the page itself is served."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from motley.report.material import gather
from motley.report.page import plotly_script, render

LOOPBACK = "127.0.0.1"


def state(folder: Path) -> str:
    """Return a text that changes whenever there is a new round, result or picture."""
    files = [*folder.glob("metrics.jsonl"), *folder.glob("study.json"), *folder.glob("analysis/*.png")]
    return " ".join(f"{file.name}:{file.stat().st_mtime_ns}" for file in sorted(files))


def serve(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a run's page; port 0 takes a free one.

    There are three answers, and none of them depends on the requested path, so no path leads out of the folder.
    Requests for another host name are rejected, so that no web page can read the report through the user's browser.
    """
    answers: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html; charset=utf-8", lambda: render(gather([folder]), folder.resolve().name, live=True)),
        "/state": ("text/plain", lambda: state(folder)),
        "/plotly.js": ("text/javascript", plotly_script),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").partition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self.send_error(403, "Only this machine may ask")
            elif self.path not in answers:
                self.send_error(404)
            else:
                kind, make = answers[self.path]
                content = make().encode()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "max-age=3600" if self.path == "/plotly.js" else "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: every open page asks every two seconds."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
