"""The processes of a deployed federation: the server, the nodes, and commands to the server.

Flower's telemetry, update checks and installation of packages are switched off. Flower keeps its
state in the deployment's own folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.config import Config
from motley.core.errors import MotleyError
from motley.deploy.control import EXCLUDED, Control, NoServerError, read_public_key
from motley.deploy.folder import DeployFolder, DeploySettings
from motley.deploy.status import missing_clients, nodes_of_clients
from motley.deploy.worker import TaskSource
from motley.flower.settings import read_node
from motley.runs.folder import RunFolder

#: Seconds that a server may take to start, that a process may take to stop, and between two polls.
START_S, STOP_S, LOOK_S = 60.0, 10.0, 1.0
#: The exit status of Flower's commands for every kind of failure.
FAILED = 1
#: The maximum number of absent clients that a message names.
NAMED = 20


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's commands, which start each other by name."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }


@contextmanager
def running(
    command: list[str], home: Path, sockets: tuple[int, ...] = (), output: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends. It inherits `sockets`; `output` is Popen's stdout."""
    errors = subprocess.STDOUT if output is not None else None
    process = subprocess.Popen(
        command, env=environment(home), pass_fds=sockets, stdout=output, stderr=errors
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- the server


def serve(folder: DeployFolder) -> int:
    """Run the server, with the nodes whose keys are in the folder; return its exit status."""
    settings = folder.read_settings()
    warn_of_unknown_host(settings)
    with listen(settings) as public, bound("127.0.0.1", 0) as private:
        folder.write_secrets(f"127.0.0.1:{private.getsockname()[1]}")
        sockets = (public.fileno(), private.fileno())
        try:
            with running(superlink_command(folder, *sockets), folder.flower, sockets) as process:
                public.close()
                private.close()
                return _serve(folder, process)
        finally:
            folder.remove_secrets()


def _serve(folder: DeployFolder, process: subprocess.Popen[bytes]) -> int:
    control = Control(folder)
    wait_for(control, process)
    register_nodes(folder, control)
    with running(superexec_command(folder), folder.flower):
        settings = folder.read_settings()
        print(
            f"serving at {settings.address}, {len(folder.public_keys())} nodes registered",
            flush=True,
        )
        return process.wait()


def superlink_command(folder: DeployFolder, public: int, private: int) -> list[str]:
    """Return the command of the server process, which inherits two sockets."""
    return [
        sys.executable,
        "-m",
        "motley.deploy.superlink",
        str(folder.path),
        str(public),
        str(private),
    ]


def superexec_command(folder: DeployFolder) -> list[str]:
    """Return the command that runs server apps; it fetches their tasks from the server process."""
    command = ["flower-superexec", "--runtime-api-address", folder.read_secrets().address]
    command += [
        "--superexec-auth-secret-file",
        str(folder.superexec),
        "--parent-pid",
        str(os.getpid()),
    ]
    if folder.read_settings().insecure:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(folder.certificates / "ca.crt")]


def listen(settings: DeploySettings) -> socket.socket:
    """Open the public socket: on loopback if the host is loopback, else on all addresses."""
    if settings.loopback:
        return bound(settings.host, settings.port)
    return bound("::" if ":" in settings.host else "0.0.0.0", settings.port)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet."""
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise MotleyError(
            f"host = {host!r}, port = {port}: cannot be listened on: {error.strerror}."
        ) from None
    return server


def warn_of_unknown_host(settings: DeploySettings) -> None:
    """Warn if the host cannot be resolved here. Not an error: the nodes may resolve it."""
    try:
        socket.getaddrinfo(settings.host, settings.port)
    except OSError as error:
        print(
            f"motley: host = {settings.host!r}: is not found from this machine: {error.strerror}.",
            file=sys.stderr,
        )


def wait_for(control: Control, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            control.nodes()
            return
        except NoServerError:
            time.sleep(0.1)
    raise MotleyError(f"the server did not start within {START_S:g} s; its own messages are above.")


def register_nodes(folder: DeployFolder, control: Control) -> None:
    """Admit exactly the nodes whose public keys are in the folder."""
    if folder.read_settings().insecure:
        return
    wanted = {read_public_key(file): file.parent.name for file in folder.public_keys()}
    known = {bytes(node.public_key): node for node in control.all_nodes()}
    for key, node in known.items():
        if key not in wanted and node.status != EXCLUDED:
            control.unregister(node.node_id)
            print(
                f"node {node.name or node.node_id} is no longer admitted: "
                f"its key.pub is not under {folder.nodes}"
            )
    for key, name in wanted.items():
        if key not in known:
            control.register(key, name)
        elif known[key].status == EXCLUDED:
            # Flower keeps the keys of excluded nodes and never admits them again.
            raise MotleyError(
                f"{folder.nodes / name}: this node was excluded before. To admit it again, delete "
                f"{folder.flower / 'state.db'}* (Flower's list of nodes and runs; checkpoints are "
                "not in it)."
            )


# ---- a node


def node_command(file: Path, tasks: TaskSource) -> list[str]:
    """Return the SuperNode's command for a node.toml; key and ca.crt are in the same folder."""
    node, here = read_node(file), file.absolute().parent
    if not node.superlink:
        raise MotleyError(f"{file}: superlink is not set; it should be the server's host:port.")
    command = ["flower-supernode", "--superlink", node.superlink, *tasks.flags()]
    command += ["--node-config", f"motley={json.dumps(str(file.absolute()))}"]
    if node.insecure:
        return [*command, "--insecure"]
    return [
        *command,
        "--root-certificates",
        str(here / "ca.crt"),
        "--auth-supernode-private-key",
        str(here / "key"),
    ]


def free_port() -> int:
    """Return a free port of this machine, for the connection between a node's processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- a run


def play(folder: DeployFolder) -> None:
    """Start or resume the federation's run, and print its output until it ends."""
    config = folder.read_config()
    control = Control(folder)
    wait_for_nodes(folder, control, config)
    number = control.start(folder.app, {"config": config.to_toml(), "out": str(folder.run)})
    for text in control.logs(number):
        print(text, end="", flush=True)
    (status,) = [run.status for run in control.runs() if run.run_id == number]
    if status.sub_status != "completed":
        reason = (
            status.details.removeprefix("ServerApp failed with exception: ") or status.sub_status
        )
        again = f"To resume it from its last checkpoint: motley deploy run {folder.path}"
        raise MotleyError(
            f"the run failed: {reason}\n{again}"
            if RunFolder(folder.run).config.exists()
            else reason
        )


def wait_for_nodes(folder: DeployFolder, control: Control, config: Config) -> None:
    """Wait until all clients are online; print the missing ones. A resumed run does not wait."""
    limit = config.engine.flower.wait_s
    end = time.monotonic() + limit
    printed = ""
    while text := describe_missing(folder, control, config.federation.clients):
        if text != printed:
            print(f"waiting for {text}", flush=True)
        printed = text
        if RunFolder(folder.run).config.exists():
            return
        if time.monotonic() > end:
            raise MotleyError(
                f"engine.flower.wait_s = {limit:g}: still waiting for {text}; "
                "a run begins with all of its clients."
            )
        time.sleep(LOOK_S)


def describe_missing(folder: DeployFolder, control: Control, clients: int) -> str:
    """Return the number of absent nodes and, if known, their clients; empty if none is absent."""
    nodes = control.nodes()
    if folder.read_settings().insecure:
        missing = clients - len([node for node in nodes if node.status == "online"])
        return f"{missing} of {clients} nodes" if missing > 0 else ""
    absent = missing_clients(nodes_of_clients(folder, nodes), clients)
    if not absent:
        return ""
    named = ", ".join(map(str, absent[:NAMED])) + (", ..." if len(absent) > NAMED else "")
    return f"{len(absent)} of {clients} nodes: {named}"
