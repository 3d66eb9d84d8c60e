"""`motley deploy node` prints what is wrong with a node, and why Flower's SuperNode ended."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from collections import deque

from motley.deploy.folder import DeploySettings, create
from motley.deploy.lock import only_one
from motley.deploy.node import check, end_if_given_up, pass_on, why_ended
from motley.flower.settings import read_node
from tests.cli.conftest import call
from tests.flower.grid import three_nodes
from tests.flower.processes import PATIENCE, Deployment


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of client 1's node."""
    return create(tmp_path / "fed", three_nodes(), DeploySettings(port=9000)).nodes / "node-1"


# ---- before it connects


def rewrite(place: Path, pattern: str, text: str) -> None:
    file = place / "node.toml"
    file.write_text(re.sub(pattern, text, file.read_text(), count=1))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no key": (lambda place: (place / "key").unlink(), "key: there is no such file"),
    "no readable key": (lambda place: (place / "key").write_text("secret"), "key: is no node key"),
    "a folder for a key": (
        lambda place: ((place / "key").unlink(), (place / "key").mkdir()),
        "key: cannot be read: Is a directory",
    ),
    "no certificate": (lambda place: (place / "ca.crt").unlink(), "ca.crt: there is no such file"),
    "no readable certificate": (
        lambda place: (place / "ca.crt").write_text("?"),
        "ca.crt: is no certificate",
    ),
    "no server": (
        lambda place: rewrite(place, 'superlink = ".*"', 'superlink = ""'),
        "superlink = ''",
    ),
    "a URL": (
        lambda place: rewrite(place, 'superlink = "', 'superlink = "https://'),
        "should be the server's host:port",
    ),
    "an unknown size": (
        lambda place: rewrite(place, "resnet14", "resnet15"),
        "size = 'resnet15': unknown model",
    ),
    "no such device": (
        lambda place: rewrite(place, '"cpu"', '"cuda:99"'),
        "device = 'cuda:99': there is no cuda:99",
    ),
    "no data": (
        lambda place: rewrite(place, '"digits"\npath = ""', '"npz"\npath = "mine.npz"'),
        "node-1/mine.npz",
    ),
    "no data set": (
        lambda place: rewrite(place, '"digits"', '"digit"'),
        "data: unknown data set 'digit'",
    ),
    "no memory": (
        lambda place: rewrite(place, '"memory"', '"key"'),
        "key': is no folder to write to",
    ),
    "no settings": (lambda place: (place / "node.toml").unlink(), "node.toml: cannot be read"),
}


@pytest.mark.parametrize(("breaking", "said"), BROKEN.values(), ids=BROKEN)
def test_errors_are_reported_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, breaking: Callable[[Path], object], said: str
) -> None:
    monkeypatch.setattr(
        "motley.deploy.node.run_supernode", lambda *_: pytest.fail("it was started")
    )
    breaking(place)
    code, _, err = call("deploy", "node", place)
    assert code == 2 and said in err and err.startswith("motley: ") and "Traceback" not in err


def test_a_valid_node_prints_its_examples(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(place, "resnet14", "resnet18-w0.5")
    check(read_node(place / "node.toml"), place / "node.toml")
    assert capsys.readouterr().out == (
        "client 1 on cpu: 1438 training examples of 8x8x1, of which it takes its client's share\n"
        "connecting to 127.0.0.1:9000\n"
    )


def test_a_node_that_runs_already(place: Path) -> None:
    with only_one(place / "node.lock"):
        code, _, err = call("deploy", "node", place)
    assert code == 2 and "this node is already running on this machine" in err


# ---- why it ended

LOG = """\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode
{}INFO:     Shutting down
\x1b[92mINFO \x1b[0m:      SuperExec terminated gracefully.
"""
NO_CONNECTION = """\x1b[91mERROR \x1b[0m:     Exit Code: 305
Failed to initialize the connection to the SuperLink.
{}
The SuperNode could not establish a connection to the SuperLink.

For more information, visit: <https://flower.ai/>
"""
REFUSED = NO_CONNECTION.format("[code: 2004] Failed to activate SuperNode.")
VERIFY = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate"
OTHER_AUTHORITY = (
    "\x1b[91mERROR \x1b[0m:     SSL/TLS handshake error detected.\n" + NO_CONNECTION.format(VERIFY)
)
EOF = "[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"
BROKEN_OFF = OTHER_AUTHORITY.replace(VERIFY, EOF)
TOO_OLD = "\x1b[91mERROR \x1b[0m:     Exit Code: 607\nVersions 1.40 and 1.41 do not match.\n"


@pytest.mark.parametrize(
    ("code", "said", "reason", "can_heal"),
    [
        (1, REFUSED, "refused the key of client 1. Either a node with this key is connected", True),
        (1, OTHER_AUTHORITY, f"no safe connection to 127.0.0.1:9000: {VERIFY}. ", False),
        (1, TOO_OLD, "the node ended: Versions 1.40 and 1.41 do not match", False),
        (1, NO_CONNECTION.format("Something else."), "the node ended: Something else", True),
        (1, "Traceback:\n", "the node ended:", True),
        (0, "", "does not accept this node's signature", True),
        (-9, "", "the node ended with status -9", True),
        (1, BROKEN_OFF, "ended the connection before it was safe", True),
    ],
)
def test_flowers_errors_are_explained(
    place: Path, code: int, said: str, reason: str, can_heal: bool
) -> None:
    file = place / "node.toml"
    told, again = why_ended(read_node(file), file, code, LOG.format(said))
    assert reason in told and again == can_heal
    assert "\x1b" not in told and "Exit Code" not in told


def test_the_output_of_flower_is_passed_on_without_colours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: deque[str] = deque(maxlen=1)
    pass_on(BytesIO(b"\x1b[92mINFO \x1b[0m: one\ntwo \xff\n"), said)
    assert capsys.readouterr().out == "INFO : one\ntwo \ufffd\n"
    assert list(said) == ["two \ufffd\n"]


def test_a_supernode_that_has_given_up_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.deploy.node.GIVEN_UP_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        end_if_given_up(process, deque(BROKEN_OFF.splitlines()))
        assert process.wait(10.0) == -signal.SIGTERM


# ---- real processes


@pytest.mark.slow
def test_real_nodes_that_are_refused_or_cannot_train(tmp_path: Path) -> None:
    """A key in use twice, an unknown one, another authority; and data that are gone once the node is connected."""
    settings = three_nodes(
        "training.rounds=3", f"engine.flower.wait_s={PATIENCE}", "engine.flower.timeout_s=300"
    )
    with Deployment(tmp_path / "federation", settings, insecure=False) as deployment:
        own = deployment.folder.nodes / "node-1"
        images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 10
        np.savez(own / "mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        (own / "mine.npz").chmod(0o600)  # the server would name a file that others can read
        rewrite(own, '"digits"\npath = ""', '"npz"\npath = "mine.npz"')
        rewrite(own, "dealt = true", "dealt = false")
        deployment.serve()
        deployment.join(0, 1, 2)
        for client in (0, 1, 2):
            deployment.wait(
                lambda client=client: "SuperNode ID" in deployment.said(f"node-{client}")
            )  # type: ignore[misc]
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("node.toml", "key", "key.pub", "ca.crt"):
            (copy / name).write_bytes((deployment.folder.nodes / "node-0" / name).read_bytes())
        refused = {
            "twice": (
                deployment.folder.nodes / "node-0",
                "this node is already running on this machine",
            ),
            "copied": (copy, "Either a node with this key is connected"),
            "stranger": (deployment.stranger(), "or the server does not know the key"),
        }
        for name, (place, reason) in refused.items():
            assert deployment.start(name, "node", place, "--patience", 0).wait(PATIENCE) == 2
            last = deployment.said(name).strip().splitlines()[-1]
            assert last.startswith("motley: ") and reason in last
        (copy / "ca.crt").write_bytes(other_authority(tmp_path))
        began = time.monotonic()
        assert deployment.start("other", "node", copy).wait(PATIENCE) == 2
        assert time.monotonic() - began < 60, "it is not tried again"
        assert "motley: no safe connection to 127.0.0.1" in deployment.said("other")

        run = deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1)
        (own / "mine.npz").unlink()
        deployment.finish(run)
        first, *_, last = deployment.lines()
        assert "refused" not in first
        told = re.fullmatch(
            r"its node failed \(data\), see reference (\w+) in the .*", last["refused"]["1"]
        )  # type: ignore[index]
        assert told is not None
        text = f"failure {told[1]} (data): there is no file {own}/mine.npz."
        assert text in deployment.said("node-1") and text in (own / "node.log").read_text()
        assert "mine.npz" not in deployment.said("run") + deployment.said("server")


def other_authority(folder: Path) -> bytes:
    from motley.deploy.keys import write_certificates

    write_certificates(folder / "other", "127.0.0.1")
    return (folder / "other" / "ca.crt").read_bytes()
