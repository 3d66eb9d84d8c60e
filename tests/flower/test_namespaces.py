"""Several hosts on one machine: every node has a network namespace, an address and a link of its own.

Needs root and `ip`, so it is run on request only:

    MOTLEY_NAMESPACES=1 python -m pytest -m slow tests/flower/test_namespaces.py

One server and four nodes behind a bridge. One node's link is slow; another's is cut in mid-run and comes back.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.grid import three_nodes
from tests.flower.processes import Deployment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("MOTLEY_NAMESPACES"), reason="set MOTLEY_NAMESPACES=1 to run it, as root"
    ),
]

NODES = range(4)
NET = "10.213.7"
SERVER = f"{NET}.1"
SLOW, CUT = 2, 3
TIMEOUT_S = 60


def command(*words: object) -> None:
    """Run a command, and fail with its error output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr}"


class Hosts:
    """A namespace with a bridge for the server, and one with a link to it for every node."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.server = f"{prefix}-server"

    def node(self, client: int) -> str:
        """Return the namespace of a node."""
        return f"{self.prefix}-node-{client}"

    def make(self) -> None:
        """Create all namespaces, with addresses."""
        server = ("ip", "-n", self.server)
        command("ip", "netns", "add", self.server)
        command(*server, "link", "set", "lo", "up")
        command(*server, "link", "add", "bridge", "type", "bridge")
        command(*server, "address", "add", f"{SERVER}/24", "dev", "bridge")
        command(*server, "link", "set", "bridge", "up")
        for client in NODES:
            node = ("ip", "-n", self.node(client))
            command("ip", "netns", "add", self.node(client))
            command(*node, "link", "set", "lo", "up")
            command(
                *node,
                "link",
                "add",
                "wire",
                "type",
                "veth",
                "peer",
                "name",
                f"to-{client}",
                "netns",
                self.server,
            )
            command(*node, "address", "add", f"{NET}.{10 + client}/24", "dev", "wire")
            command(*node, "link", "set", "wire", "up")
            command(*server, "link", "set", f"to-{client}", "master", "bridge", "up")

    def slow_down(self, client: int) -> None:
        """Let a link carry a megabit a second, both ways; netem could delay it as well, but kernels often lack it."""
        for namespace, device in ((self.node(client), "wire"), (self.server, f"to-{client}")):
            shape = ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms")
            command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)

    def plug(self, client: int, state: str) -> None:
        """Pull a node's plug (down), or put it in again (up)."""
        command("ip", "-n", self.server, "link", "set", f"to-{client}", state)

    def remove(self) -> None:
        """Remove the namespaces; links go with them."""
        for namespace in (self.server, *map(self.node, NODES)):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Make hosts for the length of a block."""
    made = Hosts(f"motley-{os.getpid()}")
    try:
        made.make()
        yield made
    finally:
        made.remove()


def without(deployment: Deployment) -> list[list[str]]:
    """Return whom each round so far went on without."""
    return [sorted(line.get("refused", {})) for line in deployment.lines()]  # type: ignore[call-overload]


def test_a_slow_link_costs_time_and_a_cut_one_costs_rounds(tmp_path: Path) -> None:
    settings = (
        "federation.clients=4",
        "federation.clients_per_round=4",
        "training.rounds=40",
        "server.min_fraction=0.5",
    )
    waits = (f"engine.flower.wait_s={TIMEOUT_S}", f"engine.flower.timeout_s={TIMEOUT_S}")
    with hosts() as places:
        config = three_nodes(*settings, *waits)
        with Deployment(tmp_path / "federation", config, insecure=False, host=SERVER) as deployment:
            deployment.namespaces = {"server": places.server, "run": places.server}
            deployment.namespaces |= {f"node-{client}": places.node(client) for client in NODES}
            places.slow_down(SLOW)
            deployment.serve()
            deployment.join(*NODES)
            run = deployment.play()

            def until(ready: Callable[[], bool]) -> None:
                deployment.wait(lambda: ready() or run.poll() is not None)
                assert ready(), deployment.said("run")

            until(lambda: len(deployment.lines()) >= 2)
            assert without(deployment)[:2] == [[], []], "a slow link is no failure"
            places.plug(CUT, "down")
            until(lambda: [str(CUT)] in without(deployment))
            places.plug(CUT, "up")
            mended = len(deployment.lines())
            until(lambda: [] in without(deployment)[mended:])
            assert all(absent in ([], [str(CUT)]) for absent in without(deployment))
