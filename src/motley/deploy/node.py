"""`motley deploy node`: checks the node's settings and files, then runs Flower's SuperNode.

A node that connects looks healthy to the server, so data, size and device are checked before. A
SuperNode that ends is started again only if that can help. The reasons why it ended are told apart
by its output, because its exit status is always the same.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, NoReturn

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from motley.core.errors import MotleyError, unknown
from motley.deploy.commands import FAILED, environment, free_port, node_command, running
from motley.deploy.keys import make_node_key
from motley.deploy.lock import only_one
from motley.deploy.permissions import OTHERS, files_in, private_files, report, restrict_access
from motley.deploy.worker import CLIENT_APP, RECONNECT, TaskSource, WorkerSettings, run_tasks
from motley.engine.device import choose_devices
from motley.flower.examples import read_data
from motley.flower.failures import LOG
from motley.flower.ledger import describe_ledger
from motley.flower.settings import NodeSettings, read_node
from motley.models import MODELS

#: Seconds that a SuperNode may take to end by itself after a failed handshake.
GIVEN_UP_S = 5.0
#: Seconds that a node waits before it tries again.
AGAIN_S = 5.0
#: One arena for glibc's malloc. By default, every thread of Flower's transfers would keep an arena
#: with free memory.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
#: glibc maps every block of at least 256 KiB separately, so that freeing it unmaps it.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
#: The number of last lines of a SuperNode's output in which the reason for its end is looked up.
TAIL = 50
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# Texts in Flower's output.
REFUSED = "Failed to activate SuperNode"
NOT_SAFE = "SSL/TLS handshake error detected"
#: Beside NOT_SAFE: the server, or a proxy before it, was stopped while a node connected.
BROKEN_OFF = "EOF occurred in violation of protocol"
GENERAL = "Failed to initialize the connection to the SuperLink."
#: Flower's exit code for a node without a connection, the only code for which another try may help.
NO_CONNECTION = "305"


def be_node(file: Path, patience: float, app: str = CLIENT_APP) -> NoReturn:
    """Run a node until it is stopped, or ends for a reason that another try would not change.

    A server refuses a key that it does not know (yet), and the key of a node that was killed less
    than a minute ago. So a node that is refused tries again for `patience` seconds.
    """
    node = read_node(file)
    with private_files():
        check(node, file)
        restrict_access(private_paths(node, file), file.absolute().parent)
        _be_node(node, file, patience, app)


def _be_node(node: NodeSettings, file: Path, patience: float, app: str) -> NoReturn:
    with only_one(file.absolute().parent / "node.lock"):
        end = time.monotonic() + patience
        while True:
            began = time.monotonic()
            code, output = run_supernode(file, worker_settings(node, file, app))
            was_admitted = code in (0, RECONNECT)
            if was_admitted or time.monotonic() - began > patience:
                end = time.monotonic() + patience
            reason, can_heal = why_ended(node, file, code, output)
            if not can_heal or time.monotonic() > end:
                raise MotleyError(reason)
            print(
                f"motley: {reason}\nmotley: trying again in {AGAIN_S:g} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(AGAIN_S)


# ---- before it connects


def check(node: NodeSettings, file: Path) -> None:
    """Raise an error if the node could not train or could not connect."""
    here = file.absolute().parent
    if not re.fullmatch(r"[^/\s]+:\d{1,5}", node.superlink):
        raise MotleyError(
            f"{file}: superlink = {node.superlink!r}: should be the server's host:port."
        )
    if not node.insecure:
        make_first_key(node, here)
        check_key(here / "key")
        check_certificate(here / "ca.crt")
    check_size(node, file)
    try:
        choose_devices(node.device)
    except MotleyError as error:
        raise MotleyError(f"{file}: {str(error).removeprefix('engine.')}") from None
    try:
        Path(node.memory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MotleyError(
            f"{file}: memory = {node.memory!r}: is no folder to write to: {error.strerror}."
        ) from None
    try:
        train = read_data(node, tested=False).train
    except (MotleyError, OSError, ValueError) as error:
        raise MotleyError(f"{file}: data: {error}") from None
    try:
        ledger = describe_ledger(node)
    except MotleyError as error:
        raise MotleyError(f"{file}: {error}") from None
    shape = "x".join(map(str, train.inputs.shape[1:]))
    share = ", of which it takes its client's share" if node.data.dealt else ""
    print(
        f"client {node.client} on {node.device}: {len(train)} training examples of {shape}{share}",
        flush=True,
    )
    if ledger:
        print(ledger, flush=True)
    print(f"connecting to {node.superlink}", flush=True)


def check_size(node: NodeSettings, file: Path) -> None:
    """Reject sizes that no run can have. A size is a model or a part of one (resnet18-w0.5)."""
    if node.modules:
        return  # a run may have models of the user's own
    models = [entry.name for entry in MODELS]
    parts = tuple(f"{model}-" for model in models)
    if node.size and node.size not in models and not node.size.startswith(parts):
        raise MotleyError(f"{file}: size = {node.size!r}: {unknown('model', node.size, models)}")


def make_first_key(node: NodeSettings, here: Path) -> None:
    """Make the node's key pair if it has none, and say how the server admits it."""
    # A public key alone: the private one is elsewhere, and a new pair would replace it.
    if (here / "key").exists() or (here / "key.pub").exists():
        return
    fingerprint = make_node_key(here)
    print_how_to_admit(node.client, here, fingerprint)


def print_how_to_admit(client: int, here: Path, fingerprint: str) -> None:
    """Print how the server's operator admits a new public key."""
    print(
        f"client {client}: made a key pair, {fingerprint}\n"
        f"send {here / 'key.pub'} to the server, and admit it there:\n"
        f"    motley deploy admit DIR {client} --key key.pub",
        flush=True,
    )


def private_paths(node: NodeSettings, file: Path) -> Iterator[Path]:
    """Yield the files and folders of a node that only its user may read.

    The folder may also have data in it, whose permissions are left to their owner.
    """
    here = file.absolute().parent
    yield here
    for pattern in ("node.*", "key*", "ca.crt"):
        yield from here.glob(pattern)
    yield from files_in(home_of(file))
    memory = Path(node.memory)
    if here in memory.parents:
        yield from files_in(memory)
    elif memory.stat().st_mode & OTHERS:
        report(
            f"{memory}: other users have access to this folder, where clients' states are kept; "
            "chmod 700 takes it away."
        )


def check_key(key: Path) -> None:
    """Reject keys that Flower could not use."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except FileNotFoundError:
        raise MotleyError(
            f"{key}: there is no such file. It is the private key that belongs to key.pub beside "
            "it, and is on the machine where it was made or handed over to. To make a new pair "
            f"here: motley deploy keygen {key.parent} --replace"
        ) from None
    except OSError as error:
        raise MotleyError(f"{key}: cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise MotleyError(
            f"{key}: is no node key: it should be a private key as `motley deploy keygen` makes it."
        )


def check_certificate(certificate: Path) -> None:
    """Reject a certificate file that is missing or cannot be loaded."""
    if not certificate.is_file():
        raise MotleyError(
            f"{certificate}: there is no such file. It is the certificate of the federation's "
            "authority; copy it from the server's folder, certificates/ca.crt."
        )
    try:
        ssl.create_default_context(cafile=str(certificate))
    except OSError as error:  # ssl.SSLError is one
        raise MotleyError(f"{certificate}: is no certificate that can be read: {error}.") from None


# ---- while it runs


def worker_settings(node: NodeSettings, file: Path, app: str = CLIENT_APP) -> WorkerSettings:
    """Return the settings of the process that answers messages."""
    return WorkerSettings(
        app,
        worker_environment(node, file),
        keep_alive_s=node.keep_alive_s,
        max_idle_mb=node.max_idle_mb,
        stall_s=node.stall_s,
        log=file.absolute().parent / LOG,
    )


def worker_environment(node: NodeSettings, file: Path) -> dict[str, str]:
    """Return the environment of the process that answers messages.

    With a memory limit, freed memory is returned to the system at once. Otherwise glibc's malloc
    keeps some of it, between blocks in use, which saves page faults and so makes steps faster.
    """
    variables = {**ONE_ARENA, **environment(home_of(file))}
    if node.budget.memory_mb is not None:
        variables = {**GIVE_BACK, **variables}
    if node.code:
        inherited = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [node.code, inherited]))
    return variables


def home_of(file: Path) -> Path:
    """Return the folder in which Flower keeps a node's files."""
    return file.absolute().parent / "flower"


def run_supernode(file: Path, worker: WorkerSettings) -> tuple[int, str]:
    """Run Flower's SuperNode until it ends, with a worker for its messages.

    Return the SuperNode's exit status and its last lines. All output is on this terminal.
    """
    home = home_of(file)
    tasks = TaskSource(home, free_port())
    with running(node_command(file, tasks), home, output=subprocess.PIPE) as process:
        assert process.stdout is not None
        tail: deque[str] = deque(maxlen=TAIL)
        echo = Thread(target=pass_on, args=(process.stdout, tail), daemon=True)
        echo.start()
        Thread(target=end_if_given_up, args=(process, tail), daemon=True).start()
        code = run_tasks(process, tasks, worker)
        echo.join(1.0)
    return code, "".join(tail)


def end_if_given_up(process: subprocess.Popen[bytes], tail: deque[str]) -> None:
    """End a SuperNode that has given up its connection after a failed handshake.

    Flower's process lives on after that, but never asks for a message again.
    """
    while process.poll() is None:
        if any(NOT_SAFE in line for line in list(tail)):
            time.sleep(GIVEN_UP_S)  # at its start it ends by itself, with more output
            process.terminate()
            return
        time.sleep(1.0)


def pass_on(output: IO[bytes], tail: deque[str]) -> None:
    """Print every line of a process, and keep the last ones in `tail`."""
    colours = sys.stdout.isatty()
    for line in output:
        text = line.decode(errors="replace")
        tail.append(text)
        with suppress(OSError, ValueError):  # a closed terminal must not stop the node
            sys.stdout.write(text if colours else COLOUR.sub("", text))
            sys.stdout.flush()


def why_ended(node: NodeSettings, file: Path, code: int, output: str) -> tuple[str, bool]:
    """Return why a SuperNode ended, and whether another try may help."""
    here, server = file.absolute().parent, node.superlink
    if code == RECONNECT:
        return "the training process ended while it sent an answer.", True
    if REFUSED in output:
        reason = (
            f"the server at {server} refused the key of client {node.client}. Either a node with "
            "this key is connected, or was killed less than a minute ago; or the server does not "
            f"know the key, or has revoked it: {here / 'key.pub'} should be admitted there "
            f"(motley deploy admit DIR {node.client} --key key.pub)."
        )
        return reason, True
    if NOT_SAFE in output and BROKEN_OFF in output:
        return f"the server at {server} ended the connection before it was safe.", True
    if NOT_SAFE in output:
        reason = (
            f"no safe connection to {server}: {last_words(output)}. {here / 'ca.crt'} should be "
            "the file certificates/ca.crt of the server's folder, and superlink the host that "
            "`motley deploy init` was given."
        )
        return reason, False
    if code == FAILED:
        known = re.search(r"Exit Code: (\d+)", output)
        return f"the node ended: {last_words(output)}.", known is None or known[1] == NO_CONNECTION
    if code == 0:
        reason = (
            f"the server at {server} does not accept this node's signature: its key was revoked "
            "there, or the clocks of the two machines differ by more than a few seconds."
        )
        return reason, True
    # A negative status is a signal, for example from the system because memory ran out.
    return f"the node ended with status {code}: {last_words(output)}.", code < 0


def last_words(output: str) -> str:
    """Return why a SuperNode ended: the first specific line after its exit code, or the last."""
    lines = [line.strip() for line in COLOUR.sub("", output).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if "Exit Code:" in line:
            lines = [line for line in lines[number + 1 :] if line != GENERAL][:1]
            break
    return lines[-1].rstrip(".") if lines else "it did not say why"
