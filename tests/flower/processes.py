"""A federation of real processes on loopback, all of which end with the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from motley.config import Config
from motley.deploy.commands import free_port
from motley.deploy.folder import DeploySettings, KeyPlace, create
from motley.runs.metrics import MetricsLog

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 600.0
"""Seconds before a test gives up: processes start slowly on a busy machine."""


def is_worker(process: int) -> bool:
    """Tell whether a process runs a node's client app."""
    try:
        return b"motley.deploy.task" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


class Deployment:
    """The commands of `motley deploy` on one folder, each a process of its own."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        insecure: bool,
        nodes: str = "",
        host: str = "127.0.0.1",
        keys: KeyPlace = "here",
        umask: int = -1,
    ) -> None:
        """`nodes`: an app that the nodes run instead of Motley's own. `umask`: as in Popen."""
        self.folder = create(
            folder,
            config,
            DeploySettings(host=host, port=free_port(), insecure=insecure),
            keys=keys,
        )
        self.node_app = nodes
        self.umask = umask
        self.logs = folder.with_name("logs")
        self.logs.mkdir()
        self.namespaces: dict[str, str] = {}
        """Role -> the network namespace of its commands, if it has one."""

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes with this folder in their environment, also those that Flower started."""
        while ours := [process for process in self._processes() if self._is_ours(process)]:
            for process in ours:
                self._kill(process)
            time.sleep(0.1)

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start one of the commands of `motley deploy`, with its output in a log of that name."""
        return self._start(name, "motley", "deploy", *arguments)

    def _start(self, name: str, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        place = ["ip", "netns", "exec", self.namespaces[name]] if name in self.namespaces else []
        with (self.logs / name).open("ab") as log:
            return subprocess.Popen(
                [*place, sys.executable, "-m", module, *map(str, arguments)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(
                        (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))
                    ),
                    "MOTLEY_TEST": str(self.folder.path),
                    "MOTLEY_ROLE": name,
                },
                stdout=log,
                stderr=log,
                umask=self.umask,
            )

    def serve(self) -> None:
        """Start the server, and wait until it serves."""
        before = self.said("server").count("serving at")
        server = self.start("server", "server", self.folder.path)
        self.wait(
            lambda: self.said("server").count("serving at") > before or server.poll() is not None
        )
        assert server.poll() is None, self.said("server")

    def join(self, *clients: int) -> None:
        """Start nodes."""
        for client in clients:
            name = f"node-{client}"
            if self.node_app:
                self.start_app(name, self.folder.nodes / name, self.node_app)
            else:
                self.start(name, "node", self.folder.nodes / name)

    def start_app(self, name: str, place: Path, app: str) -> None:
        """Start a node that runs another app than Motley's own."""
        self._start(name, "tests.flower.node", place, app)

    def stop(self, role: str) -> None:
        """Stop a server or a node as Ctrl-C would, and wait until all of its processes have ended."""
        for process in self._processes():
            if self._is_ours(process, role) and self._is_main(process):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
        self.wait(lambda: not any(self._is_ours(process, role) for process in self._processes()))

    @staticmethod
    def _is_main(process: int) -> bool:
        """Tell whether a process is a command of this class, and not one that it started."""
        try:
            return f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{process}/status").read_text()
        except OSError:
            return False

    def run(self) -> None:
        """Start the server and three nodes, and play to the end."""
        self.serve()
        self.join(0, 1, 2)
        self.finish(self.play())

    def play(self) -> subprocess.Popen[bytes]:
        """Start or resume the run."""
        return self.start("run", "run", self.folder.path)

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a run to end successfully."""
        try:
            assert process.wait(PATIENCE) == 0, self.said("run") + self.said("server")
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said("run") + self.said("server")[-5000:]) from None

    def kill(self, role: str) -> None:
        """Kill all processes of the server or of a node with SIGKILL, also those that Flower started."""
        for process in self._processes():
            if self._is_ours(process, role):
                self._kill(process)

    def processes(self, role: str = "") -> list[int]:
        """Return all processes, or those of a role, also those that Flower started."""
        return [process for process in self._processes() if self._is_ours(process, role)]

    def workers(self, role: str) -> list[int]:
        """Return the processes of a node that run the client app."""
        return [
            process
            for process in self._processes()
            if self._is_ours(process, role) and is_worker(process)
        ]

    def stranger(self) -> Path:
        """Return the folder of a node with a key that the server does not know."""
        from motley.deploy.keys import write_node_key

        place = self.folder.path / "stranger"
        shutil.copytree(self.folder.nodes / "node-0", place)
        for file in ("key", "key.pub"):
            (place / file).unlink()
        write_node_key(place)
        return place

    def said(self, name: str) -> str:
        """Return the output of a command."""
        log = self.logs / name
        return log.read_text(errors="replace") if log.exists() else ""

    def lines(self) -> list[dict[str, object]]:
        """Return the run's metrics so far."""
        return MetricsLog(self.folder.run / "metrics.jsonl").read()

    @staticmethod
    def wait(ready: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < end
            time.sleep(0.1)

    @staticmethod
    def _processes() -> list[int]:
        return [int(place.name) for place in Path("/proc").iterdir() if place.name.isdecimal()]

    def _is_ours(self, process: int, role: str = "") -> bool:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        mine = f"MOTLEY_TEST={self.folder.path}".encode() in variables
        return mine and (not role or f"MOTLEY_ROLE={role}".encode() in variables)

    @staticmethod
    def _kill(process: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
