"""The report as a live page. It is read-only, and only this machine can open it."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from motley.report.page import plotly_script, render
from motley.report.report_data import gather

LOOPBACK = "127.0.0.1"


def state(folder: Path) -> str:
    """Return a text that changes whenever a round, a study's result or a picture is added."""
    files: list[Path] = []
    for pattern in ("metrics.jsonl", "study.json", "analysis/*.png"):
        files.extend(folder.glob(pattern))
    return " ".join(f"{file.name}:{file.stat().st_mtime_ns}" for file in sorted(files))


def serve(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server for the page of a run or a study. Port 0 chooses a free port.

    Only three paths exist and no file is looked up by its path, so no request can read other files.
    Requests for another host name are rejected, so that no web page can read the report through
    the user's browser (DNS rebinding).
    """

    def page() -> str:
        return render(gather([folder]), folder.resolve().name, live=True)

    # Path -> content type, and a function that returns the content.
    routes: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html; charset=utf-8", page),
        "/state": ("text/plain", lambda: state(folder)),
        "/plotly.js": ("text/javascript", plotly_script),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").partition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self.send_error(403, "Only available on this machine")
            elif self.path not in routes:
                self.send_error(404)
            else:
                content_type, produce = routes[self.path]
                content = produce().encode()
                caching = "max-age=3600" if self.path == "/plotly.js" else "no-store"
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", caching)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: every open page sends a request every two seconds."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
