"""Runs the client app that is installed at the node on the messages that arrive, in one process per message.

Flower's SuperNode would install the app that comes with a message, and run that: a server, or anybody who has taken one
over, would run any code at every node. Flower can check the signatures of apps (`--trusted-entities`), but it signs
only apps from its own hub. So Motley starts the SuperNode without the part that runs apps, and does that part itself:
it runs its own client app, and neither installs nor imports the app that the server sent.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from motley.core.errors import MotleyError
from motley.files import write_secret

CLIENT_APP = "motley.flower.client:app"
POLL_S = 0.2


class TaskSource:
    """The SuperNode's messages, as tasks. They are handed out on loopback, to those who know a secret."""

    def __init__(self, folder: Path, port: int) -> None:
        """`folder` is the node's own; the secret in it is new with every start."""
        self.address = f"127.0.0.1:{port}"
        self.port = port
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = folder / "superexec.secret"
        self.secret.unlink(missing_ok=True)
        write_secret(self.secret, secrets.token_bytes(32))

    def flags(self) -> list[str]:
        """Return the flags with which a SuperNode runs no app itself, and hands its messages to us alone."""
        secret = ["--superexec-auth-secret-file", str(self.secret)]
        return ["--isolation", "process", "--host", "127.0.0.1", "--port", str(self.port), *secret]

    def connect(self) -> RuntimeHttpClient:
        """Return a client of the SuperNode's Runtime API."""
        proof = SuperExecAuthHttpInterceptor(
            master_secret=self.secret.read_bytes(),
            protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        return RuntimeHttpClient.from_server_address(self.address, True, None, interceptors=[version, proof])


def next_task(client: RuntimeHttpClient) -> str:
    """Return the token of the next message's task; empty if there is none, or if the SuperNode is not up yet."""
    try:
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.TransportError:
        return ""
    except httpx.HTTPStatusError as error:
        raise MotleyError(f"the SuperNode of this node refused to hand out messages: {error}") from None
    return str(answer.token) if answer.HasField("task") else ""


def run_tasks(node: subprocess.Popen[bytes], source: TaskSource, app: str, environment: dict[str, str]) -> int:
    """Run `app` for every message, until the SuperNode ends; return how it ended."""
    client = source.connect()
    try:
        while node.poll() is None:
            token = next_task(client)
            if token:
                run_task(node, source, app, token, environment)
            else:
                time.sleep(POLL_S)
    finally:
        client.close()
    return node.returncode


def run_task(
    node: subprocess.Popen[bytes], source: TaskSource, app: str, token: str, environment: dict[str, str]
) -> None:
    """Run `app` on one message, in a process of its own; stop it if the SuperNode ends before."""
    command = [sys.executable, "-m", "motley.deploy.task", source.address, app]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            # Not an argument, which every user of the machine could read.
            process.stdin.write(f"{token} {time.time()}\n")
            process.stdin.close()
            while process.poll() is None and node.poll() is None:
                time.sleep(POLL_S)
        finally:
            process.kill()
