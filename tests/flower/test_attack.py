"""Real processes under attack: a stranger at the public address, a local user, and a server that was taken over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.deploy.control import Control
from tests.flower.attack import Stranger
from tests.flower.grid import three_nodes
from tests.flower.processes import Deployment

pytestmark = pytest.mark.slow


def assert_gets_nothing(stranger: Stranger, deployment: Deployment, refusal: str) -> None:
    """Try to list the nodes, to register a key and to run code: all of it fails."""
    known = {node.node_id for node in Control(deployment.folder).nodes()}
    for attempt in (stranger.list_nodes, stranger.register_key, stranger.run_code):
        done = attempt()
        said = done.stdout + done.stderr
        assert refusal in said, said
        assert not any(str(node) in said for node in known)
    assert {node.node_id for node in Control(deployment.folder).nodes()} == known
    assert Control(deployment.folder).runs() == []
    assert stranger.left_marks() == []


def test_nobody_but_the_servers_user_starts_a_run_and_no_server_brings_code_to_a_node(
    tmp_path: Path,
) -> None:
    with Deployment(tmp_path / "federation", three_nodes(), insecure=False) as deployment:
        deployment.serve()
        deployment.join(0, 1)
        deployment.wait(
            lambda: all("SuperNode ID" in deployment.said(f"node-{client}") for client in (0, 1))
        )
        public = tmp_path / "ca.crt"
        shutil.copy(deployment.folder.certificates / "ca.crt", public)

        # Anybody who reaches the port that nodes use.
        address = deployment.folder.read_settings().address
        stranger = Stranger(tmp_path / "stranger", address, public)
        assert_gets_nothing(stranger, deployment, "404 Not Found")
        assert "/v1/control/start-run" in deployment.said("server")

        # Another user of the server's machine, who finds the port on loopback.
        private = deployment.folder.read_secrets().address
        neighbour = Stranger(tmp_path / "neighbour", private, public)
        assert_gets_nothing(neighbour, deployment, "Authentication")

        # Somebody who has become the server's user can run code there, but not at the nodes.
        intruder = Stranger(tmp_path / "intruder", private, public)
        control = Control(deployment.folder)
        printed = "".join(control.logs(control.start(intruder.app, {})))
        assert printed.count("error") == 2 and "ran the code" not in printed, printed
        assert intruder.left_marks() == ["server"]
        assert not list(deployment.folder.nodes.rglob("evil.py"))
