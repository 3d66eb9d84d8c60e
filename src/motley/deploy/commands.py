"""Flower's commands, with the flags that a Motley federation needs.

Telemetry, update checks and the installation of packages at run time are off; Flower keeps its state in the
deployment's own folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from motley.deploy.folder import LINK, DeployFolder
from motley.engine.flower.settings import read_node
from motley.errors import MotleyError

START_S, STOP_S = 60.0, 10.0
"""How long a server may take to start, and a process to stop."""
FAILED = 1
"""What Flower's commands return for every kind of failure."""


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's commands; their folder comes first, as they start each other by name."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }


def server_command(folder: DeployFolder) -> list[str]:
    """Return the command of the server."""
    settings, certificates = folder.read_settings(), folder.certificates
    command = ["flower-superlink", "--host", settings.host if settings.loopback else "0.0.0.0"]
    command += ["--port", str(settings.port), "--database", str(folder.flower / "state.db")]
    command += ["--disable-runtime-dependency-installation"]
    if settings.insecure:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certificates / "ca.crt"), "--ssl-certfile", str(certificates / "server.pem")]
    return [*command, "--ssl-keyfile", str(certificates / "server.key"), "--enable-supernode-auth"]


def node_command(file: Path) -> list[str]:
    """Return the command of the node whose settings are in a file; key and ca.crt lie beside it."""
    node, here = read_node(file), file.absolute().parent
    command = ["flower-supernode", "--superlink", node.superlink, "--port", str(free_port())]
    command += ["--node-config", f"motley={json.dumps(str(file.absolute()))}"]
    if node.insecure:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(here / "ca.crt"), "--auth-supernode-private-key", str(here / "key")]


def free_port() -> int:
    """Return a port of this machine that nobody listens on; a node's own processes talk over it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], home: Path, output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, however it ends; `output` is where it prints to, as for Popen."""
    errors = subprocess.STDOUT if output is not None else None
    process = subprocess.Popen(command, env=environment(home), stdout=output, stderr=errors)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(folder: DeployFolder) -> int:
    """Run the server, with all nodes registered whose keys lie in the folder; return how it ended."""
    if answers(folder):
        raise MotleyError(f"port = {folder.read_settings().port}: is taken by another process on this machine.")
    with running(server_command(folder), folder.flower) as process:
        wait_for(folder, process)
        for key in folder.public_keys():
            register(folder, key)
        print(f"serving at {folder.read_settings().address}, {len(folder.public_keys())} nodes registered", flush=True)
        return process.wait()


def wait_for(folder: DeployFolder, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if answers(folder):
            return
        time.sleep(0.1)
    raise MotleyError(f"the server did not start on {folder.read_settings().address} within {START_S:g} s.")


def answers(folder: DeployFolder) -> bool:
    """Tell whether something listens where the server should."""
    settings = folder.read_settings()
    with socket.socket() as probe:
        return probe.connect_ex((settings.host, settings.port)) == 0


def register(folder: DeployFolder, key: Path) -> None:
    """Let a node take part. One that was registered before stays so."""
    said = flwr(folder, "supernode", "register", str(key), LINK, "--name", key.parent.name)
    if said.returncode and "already" not in said.stdout + said.stderr:
        raise MotleyError(f"{key} could not be registered: {said.stdout}{said.stderr}")


def flwr(folder: DeployFolder, *arguments: str, show: bool = False) -> subprocess.CompletedProcess[str]:
    """Run one of Flower's commands to its end; show what it says, or return it."""
    return subprocess.run(
        ["flwr", *arguments], env=environment(folder.flower), capture_output=not show, text=True, check=False
    )


def play(folder: DeployFolder) -> str:
    """Begin the federation's run, or go on with it; return how it ended.

    Flower's command ends well even where the run did not: what counts is the state of the run.
    """
    with tempfile.TemporaryDirectory() as place:
        values = Path(place) / "values.toml"
        values.write_text(tomli_w.dumps({"config": folder.read_config().to_toml(), "out": str(folder.run)}))
        flwr(folder, "run", str(folder.app), LINK, "--stream", "--run-config", str(values), show=True)
    runs = status(folder)
    return str(runs[0]["status"]) if runs else "unknown"


def status(folder: DeployFolder) -> list[dict[str, Any]]:
    """Return what the server knows of its runs, the latest first."""
    said = flwr(folder, "ls", LINK, "--format", "json")
    try:
        return list(json.loads(said.stdout)["runs"])
    except (ValueError, KeyError):
        raise MotleyError(f"the server does not answer: {(said.stdout + said.stderr).strip()}") from None
