"""Runs the client app that is installed at the node on the messages that arrive.

Flower's SuperNode would install the app that comes with a message and run it: a server, or anybody
who has taken one over, could run any code at every node. Flower can check the signatures of apps
(`--trusted-entities`), but it signs only apps from its own hub. So Motley starts the SuperNode
without the part that runs apps (`--isolation process`) and does that part itself: it runs its own
client app, and neither installs nor imports the app that the server sent.

The app runs in a worker process (task.py), which answers one message after the other. It starts
with the first message and stays for `keep_alive_s` seconds after the last one, so that the next
message finds torch imported and the client built. If it dies, the next message starts another.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from motley.core.errors import MotleyError
from motley.files import write_secret

CLIENT_APP = "motley.flower.client:app"
#: Seconds between two polls for a message.
POLL_S = 0.2
#: Seconds that a worker may take to end when it is told to.
END_S = 5.0
#: A worker's report after a message if it stays alive for the next one.
STAYS = "stays"


class TaskSource:
    """The SuperNode's messages, which it hands out on loopback to processes that know a secret."""

    def __init__(self, folder: Path, port: int) -> None:
        """`folder` is the node's folder. Every start writes a new secret to it."""
        self.address = f"127.0.0.1:{port}"
        self.port = port
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = folder / "superexec.secret"
        self.secret.unlink(missing_ok=True)
        write_secret(self.secret, secrets.token_bytes(32))

    def flags(self) -> list[str]:
        """Return the flags of a SuperNode that runs no app itself and hands its messages to us."""
        secret = ["--superexec-auth-secret-file", str(self.secret)]
        return ["--isolation", "process", "--host", "127.0.0.1", "--port", str(self.port), *secret]

    def connect(self) -> RuntimeHttpClient:
        """Return a client of the SuperNode's Runtime API."""
        proof = SuperExecAuthHttpInterceptor(
            master_secret=self.secret.read_bytes(),
            protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        return RuntimeHttpClient.from_server_address(
            self.address, True, None, interceptors=[version, proof]
        )


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of the node's worker process."""

    #: The client app, as MODULE:ATTRIBUTE.
    app: str = CLIENT_APP
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Seconds that the process stays alive after a message; 0: one process per message.
    keep_alive_s: float = 0.0
    #: If the process has more resident memory than this after a message, it ends.
    max_idle_mb: float = float("inf")


class Worker:
    """A process that runs the client app on one message after the other.

    Every message's token goes to its standard input, because every user of the machine could read
    an argument. The process reports every message that it has dealt with on its standard output.
    """

    def __init__(self, address: str, settings: WorkerSettings) -> None:
        command = [sys.executable, "-m", "motley.deploy.task", address, settings.app]
        command.append(str(settings.max_idle_mb))
        self._process = subprocess.Popen(
            command,
            env=dict(settings.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        #: For every message that was dealt with: whether the process stays. False at its end.
        self._reports: SimpleQueue[bool] = SimpleQueue()
        self._busy = False
        self._last_used = time.monotonic()
        Thread(target=self._listen, name="worker", daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._reports.put(line.strip() == STAYS)
        self._reports.put(False)

    @property
    def idle_s(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._last_used

    @property
    def alive(self) -> bool:
        """Whether the process can take a message."""
        return self._process.poll() is None

    def answer(self, token: str, node: subprocess.Popen[bytes]) -> bool:
        """Hand a message over, wait until it is dealt with, and return whether the worker stays.

        This ends early if the worker or the node ends. If the worker dies, the SuperNode notices
        that its heartbeat stops: it answers the message with an error, or hands it out again if it
        had not been fetched.
        """
        assert self._process.stdin is not None
        self._busy = True
        try:
            self._process.stdin.write(f"{token} {time.time()}\n")
            self._process.stdin.flush()
        except OSError:  # the worker has just died
            return False
        while node.poll() is None:
            try:
                stays = self._reports.get(timeout=POLL_S)
            except Empty:
                continue
            self._busy = False
            self._last_used = time.monotonic()
            return stays
        return False

    def end(self) -> None:
        """End the process: a busy one is killed, an idle one ends by itself when its input does."""
        assert self._process.stdin is not None
        if self._busy:
            self._process.kill()
        with suppress(OSError):  # closing flushes, which fails if the process is dead
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def next_task(client: RuntimeHttpClient) -> str:
    """Return the token of the next message's task; empty if there is none, or no SuperNode yet."""
    try:
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.TransportError:
        return ""
    except httpx.HTTPStatusError as error:
        raise MotleyError(
            f"the SuperNode of this node refused to hand out messages: {error}"
        ) from None
    return str(answer.token) if answer.HasField("task") else ""


def run_tasks(node: subprocess.Popen[bytes], source: TaskSource, settings: WorkerSettings) -> int:
    """Have every message answered by a worker, until the SuperNode ends; return how it ended."""
    client = source.connect()
    worker: Worker | None = None
    try:
        while node.poll() is None:
            token = next_task(client)
            if not token:
                if worker is not None and worker.idle_s > settings.keep_alive_s:
                    worker.end()
                    worker = None
                time.sleep(POLL_S)
                continue
            if worker is not None and not worker.alive:
                worker.end()
                worker = None
            if worker is None:
                worker = Worker(source.address, settings)
            stays = worker.answer(token, node)
            if not stays or settings.keep_alive_s == 0:
                worker.end()
                worker = None
    finally:
        client.close()
        if worker is not None:
            worker.end()
    return node.returncode
