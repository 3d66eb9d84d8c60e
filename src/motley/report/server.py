"""The report as a live page. It is read-only, and only this machine can open it.

Any program and any web page on this machine can send requests to a local port, so the server
expects hostile ones: no file is looked up by a path, other host names are refused, and a request
that does not come, comes slowly or is too long costs neither a thread nor much memory.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from motley.core.errors import MotleyError
from motley.report.page import content_policy, plotly_script, render
from motley.report.report_data import gather

LOOPBACK = "127.0.0.1"
#: Connections that are open at once. If there is one more, the oldest one is closed that has not
#: sent its request yet, or the new one if all have.
MAX_CONNECTIONS = 100
#: Bytes of a request: its first line and its headers.
MAX_REQUEST = 8_192
#: Seconds in which a request must arrive, and in which a response must be taken.
READ_SECONDS = 5.0
WRITE_SECONDS = 20.0
#: Sent with every response. The page's own policy is added to the page.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Connection": "close",
}


def state(folder: Path) -> str:
    """Return a text that changes whenever a round, a study's result or a picture is added."""
    files: list[Path] = []
    for pattern in ("metrics.jsonl", "study.json", "analysis/*.png"):
        files.extend(folder.glob(pattern))
    states = []
    for file in sorted(files):
        with suppress(OSError):  # it may just have been replaced
            states.append(f"{file.name}:{file.stat().st_mtime_ns}")
    return " ".join(states)


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    status: HTTPStatus
    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, *, with_content: bool) -> bytes:
        """Return the bytes that are sent. The answer to HEAD has no content."""
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        described = {"Content-Type": self.content_type, "Content-Length": str(len(self.content))}
        for name, value in {**described, **HEADERS, **self.headers}.items():
            lines.append(f"{name}: {value}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head + self.content if with_content else head


def refusal(status: HTTPStatus, reason: str, **headers: str) -> Response:
    """Return the answer to a request that is not served."""
    return Response(status, f"{reason}\n".encode(), headers=headers)


@dataclass(frozen=True)
class Request:
    """The first line and the host of a request."""

    method: str
    path: str
    host: str

    @classmethod
    def parse(cls, raw: bytes) -> Request | None:
        """Return the request, or None if it is malformed."""
        first, *others = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return None
        hosts = []
        for line in others:
            name, colon, value = line.partition(":")
            if not colon:
                return None
            if name.lower() == "host":
                hosts.append(value.strip().lower())
        return cls(words[0], words[1], hosts[0]) if len(hosts) == 1 else None


class ReportServer:
    """An HTTP server for the page of a run or a study.

    One thread reads all requests (asyncio), and one other makes the pages.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self._listening = socket.create_server((LOOPBACK, port), backlog=MAX_CONNECTIONS)
        self.server_address: tuple[str, int] = self._listening.getsockname()
        self.server_port = self.server_address[1]
        #: Connections, the oldest first -> whether their request has arrived.
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="report")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._finished = threading.Event()
        # Path -> content type, and a function that returns the content.
        self._routes: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html; charset=utf-8", self._page),
            "/state": ("text/plain; charset=utf-8", lambda: state(self.folder)),
            "/plotly.js": ("text/javascript; charset=utf-8", plotly_script),
        }

    def _page(self) -> str:
        return render(gather([self.folder]), self.folder.resolve().name, live=True)

    # ---- the loop

    def serve_forever(self) -> None:
        """Serve until `shutdown` is called by another thread, or Ctrl-C is pressed."""
        try:
            asyncio.run(self._serve())
        finally:
            self._finished.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connected, sock=self._listening)
        try:
            await self._stop.wait()
        finally:
            server.close()
            for connection in list(self._connections):
                connection.cancel()

    def shutdown(self) -> None:
        """Stop serving, and wait until it has stopped. `serve_forever` must have been called."""
        while self._loop is None and not self._finished.wait(0.01):
            pass
        if self._loop is not None:
            with suppress(RuntimeError):  # it has stopped by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._finished.wait()

    def server_close(self) -> None:
        """Close the port."""
        self._listening.close()
        self._maker.shutdown(wait=False, cancel_futures=True)

    # ---- one connection

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        if len(self._connections) >= MAX_CONNECTIONS and not self._close_a_waiting_one():
            writer.transport.abort()
            return
        self._connections[connection] = False
        try:
            request = await self._read(reader)
            self._connections[connection] = True
            response = await self._answer(request)
            is_head = isinstance(request, Request) and request.method == "HEAD"
            writer.write(response.encode(with_content=not is_head))
            async with asyncio.timeout(WRITE_SECONDS):
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            # It was closed at the other end, took too long, or made room for another one. The
            # task ends here either way, so that a cancellation need not be passed on.
            writer.transport.abort()
        finally:
            del self._connections[connection]
            writer.close()

    def _close_a_waiting_one(self) -> bool:
        for connection, has_request in self._connections.items():
            if not has_request and not connection.cancelling():
                connection.cancel()
                return True
        return False

    async def _read(self, reader: asyncio.StreamReader) -> Request | Response:
        """Read one request; return the refusal of one that cannot be understood."""
        raw = b""
        async with asyncio.timeout(READ_SECONDS):
            while b"\r\n\r\n" not in raw:
                piece = await reader.read(MAX_REQUEST)
                if not piece:
                    raise EOFError
                raw += piece
                if len(raw) > MAX_REQUEST:
                    return refusal(
                        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                        f"A request has at most {MAX_REQUEST} bytes.",
                    )
        request = Request.parse(raw.partition(b"\r\n\r\n")[0])
        return request or refusal(HTTPStatus.BAD_REQUEST, "This is not a request of HTTP/1.1.")

    async def _answer(self, request: Request | Response) -> Response:
        if isinstance(request, Response):
            return request
        # Another name may belong to a web page which has been made to resolve to this machine (DNS
        # rebinding), so that its scripts could read the report through the user's browser.
        hosts = (LOOPBACK, "localhost")
        if request.host not in (*hosts, *(f"{host}:{self.server_port}" for host in hosts)):
            return refusal(HTTPStatus.FORBIDDEN, "Only available on this machine.")
        if request.method not in ("GET", "HEAD"):
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD.", Allow="GET, HEAD")
        if request.path not in self._routes:
            return refusal(HTTPStatus.NOT_FOUND, "There is no such page.")
        content_type, produce = self._routes[request.path]
        loop = asyncio.get_running_loop()
        try:
            content = await loop.run_in_executor(self._maker, produce)
        except MotleyError as error:
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except Exception as error:
            # A run writes its files meanwhile. The next request may find them complete.
            reason = f"The page could not be made: {type(error).__name__}: {error}"
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, reason)
        headers = {"Content-Security-Policy": content_policy(live=True)}
        return Response(HTTPStatus.OK, content.encode(), content_type, headers)


def serve(folder: Path, port: int) -> ReportServer:
    """Return a server for the page of a run or a study. Port 0 chooses a free port."""
    return ReportServer(folder, port)
