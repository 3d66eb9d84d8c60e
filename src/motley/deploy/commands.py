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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from motley.config import Config
from motley.core.errors import MotleyError
from motley.deploy.control import Control, NoServerError
from motley.deploy.folder import DeployFolder, DeploySettings
from motley.deploy.identity import admit, admitted_keys, register_nodes, revoke, revoked_clients
from motley.deploy.lock import is_locked
from motley.deploy.permissions import files_in, private_files, report, restrict_access
from motley.deploy.status import missing_clients, nodes_of_clients
from motley.deploy.worker import TaskSource
from motley.flower.settings import read_node
from motley.runs.folder import RunFolder

#: Seconds that a server may take to start, that a process may take to stop, and between two polls.
START_S, STOP_S, LOOK_S = 300.0, 10.0, 1.0
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
    restrict_access(files_in(folder.path), folder.path)
    warn_of_private_keys(folder)
    with private_files(), listen(settings) as public, bound("127.0.0.1", 0) as private:
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
    settings = folder.read_settings()
    nodes = len(admitted_keys(folder))
    print(f"serving at {settings.address}, {nodes} nodes registered", flush=True)
    # Without the SuperExec no run would ever start, and there would be no message about it.
    while process.poll() is None:
        with running(superexec_command(folder), folder.flower) as superexec:
            wait_for_either(process, superexec)
        if process.poll() is None:
            report(f"the SuperExec ended with status {superexec.returncode}; it is started again.")
            time.sleep(LOOK_S)
    return process.returncode


def wait_for_either(first: subprocess.Popen[bytes], second: subprocess.Popen[bytes]) -> None:
    """Wait until one of two processes has ended."""
    while first.poll() is None and second.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            first.wait(LOOK_S)


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


# ---- its nodes' keys


def warn_of_private_keys(folder: DeployFolder) -> None:
    """Warn if the private keys of nodes on other machines are still here."""
    if folder.read_settings().loopback:
        return  # the nodes are on this machine as well
    left = [str(client) for client in folder.public_keys() if folder.private_key(client).exists()]
    if left:
        report(
            f"the private keys of clients {', '.join(left)} are on this machine. When their "
            f"folders have been copied to the nodes: motley deploy handover {folder.path}"
        )


def revoke_key(folder: DeployFolder, client: int) -> None:
    """Revoke a client's key permanently, and at once if the server is running."""
    with private_files():
        fingerprint = revoke(folder, client)
    if synchronized(folder):
        print(f"client {client}: the key {fingerprint} is revoked, its node is disconnected")
    else:
        print(
            f"client {client}: the key {fingerprint} is revoked; no server is running, and the "
            "next one will not admit it"
        )


def admit_key(folder: DeployFolder, client: int, key: Path | None) -> None:
    """Admit a client's key permanently, and at once if the server is running."""
    with private_files():
        fingerprint = admit(folder, client, key)
    if synchronized(folder):
        print(f"client {client}: the key {fingerprint} is admitted")
    else:
        print(
            f"client {client}: the key {fingerprint} is admitted; no server is running, and the "
            "next one will know it"
        )


def synchronized(folder: DeployFolder) -> bool:
    """Let a running server admit exactly the keys in the folder; return whether there is one."""
    if not folder.control.exists():
        return False
    try:
        register_nodes(folder, Control(folder))
    except NoServerError:  # it was killed, and left the file behind
        return False
    return True


def hand_over(folder: DeployFolder, clients: Sequence[int]) -> None:
    """Delete private keys of nodes here, after their folders were copied to the nodes."""
    for client in clients or list(folder.public_keys()):
        key = folder.private_key(client)
        if not key.exists():
            if clients:
                raise MotleyError(f"{key}: there is no private key of client {client} here.")
            continue
        if not key.with_name("key.pub").exists():
            raise MotleyError(
                f"{key}: its public half key.pub is missing; without it the server would no "
                "longer admit the node."
            )
        if is_locked(key.with_name("node.lock")):
            raise MotleyError(f"{key}: a node on this machine is running with this key.")
        key.unlink()
        print(f"client {client}: its private key is no longer on this machine")


# ---- a node


def node_command(file: Path, tasks: TaskSource) -> list[str]:
    """Return the SuperNode's command for a node.toml; key and ca.crt are in the same folder."""
    node, here = read_node(file), file.absolute().parent
    if not node.superlink:
        raise MotleyError(f"{file}: superlink is not set; it should be the server's host:port.")
    command = [sys.executable, "-m", "motley.deploy.supernode"]
    command += ["--superlink", node.superlink, *tasks.flags()]
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


def run_deployment(folder: DeployFolder) -> None:
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
    text = f"{len(absent)} of {clients} nodes: {named(absent)}"
    keyless = [client for client in absent if client not in folder.public_keys()]
    if keyless:
        text += f"; no key was admitted for {named(keyless)} (motley deploy admit)"
    revoked = sorted(revoked_clients(folder) & set(absent))
    if revoked:
        text += f"; the key was revoked of {named(revoked)}"
    return text


def named(clients: Sequence[int]) -> str:
    """Return the numbers of clients, or of the first of them."""
    return ", ".join(map(str, clients[:NAMED])) + (", ..." if len(clients) > NAMED else "")
