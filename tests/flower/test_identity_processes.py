"""Real processes: an impostor, keys that are made on nodes, revoked and admitted again, and files' permissions."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.deploy.control import EXCLUDED, Control
from motley.deploy.permissions import files_in
from tests.flower.grid import three_nodes
from tests.flower.processes import PATIENCE, Deployment

pytestmark = pytest.mark.slow

#: The tests end long before that.
MANY = ("training.rounds=500", "server.min_fraction=0", "engine.flower.timeout_s=120")
REVOKED = "its key was revoked."


def refused(deployment: Deployment, first: int) -> list[dict[str, str]]:
    """Return the refusals of the rounds from a given one on."""
    return [line.get("refused", {}) for line in deployment.lines()[first:]]  # type: ignore[misc]


def wait_for_rounds(deployment: Deployment, more: int) -> int:
    """Wait for some more rounds; return how many there were before."""
    before = len(deployment.lines())
    deployment.wait(lambda: len(deployment.lines()) >= before + more)
    return before


def test_a_node_with_a_key_of_its_own_cannot_act_as_another_client(tmp_path: Path) -> None:
    config = three_nodes(*MANY, f"engine.flower.wait_s={PATIENCE}")
    with Deployment(tmp_path / "federation", config, insecure=False) as deployment:
        deployment.serve()
        deployment.join(0, 1, 2)
        deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1)

        # The node of client 1 leaves, and comes back as client 0.
        deployment.stop("node-1")
        place = deployment.folder.nodes / "node-1"
        file = place / "node.toml"
        honest = file.read_text()
        file.write_text(honest.replace("client = 1", "client = 0").replace("resnet14", "resnet10"))
        deployment.start_app("impostor", place, "tests.flower.impostor:app")
        reason = {"1": "its node is refused: it states that it is client 0."}
        deployment.wait(lambda: reason in refused(deployment, 0))
        before = wait_for_rounds(deployment, 2)
        assert refused(deployment, before) == [reason] * 2
        assert "train message" not in deployment.said("impostor")
        said = deployment.said("run")
        assert said.count("is refused: it states that it is client 0, but its key is bound to") == 1

        # It leaves: client 0 is not affected, and an honest node of client 1 is taken at once.
        deployment.stop("impostor")
        file.write_text(honest)
        deployment.join(1)
        deployment.wait(lambda: refused(deployment, len(deployment.lines()) - 1) == [{}])
        assert not any("0" in reasons for reasons in refused(deployment, 0))


def test_keys_are_made_on_nodes_and_revoked_and_admitted_in_a_running_federation(
    tmp_path: Path,
) -> None:
    """All commands run with a umask that lets everybody read and write."""
    config = three_nodes(*MANY, f"engine.flower.wait_s={PATIENCE}", "method.name=scaffold")
    with Deployment(
        tmp_path / "federation", config, insecure=False, keys="nodes", umask=0
    ) as deployment:
        path = deployment.folder.path

        def do(*arguments: object) -> str:
            """Run one of the server's commands, and return its output."""
            name = f"command-{'-'.join(map(str, arguments[:1]))}-{len(deployment.lines())}"
            assert deployment.start(name, *arguments).wait(PATIENCE) == 0, deployment.said(name)
            return deployment.said(name)

        deployment.serve()
        assert "0 nodes registered" in deployment.said("server")
        machines = [tmp_path / f"machine-{client}" for client in range(3)]
        for client, machine in enumerate(machines):
            shutil.copytree(deployment.folder.nodes / f"node-{client}", machine)
            deployment.start(f"node-{client}", "node", machine, "--patience", PATIENCE)
        for client, machine in enumerate(machines):
            deployment.wait(lambda machine=machine: (machine / "key.pub").exists())  # type: ignore[misc]
            do("admit", path, client, "--key", machine / "key.pub")
        deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1)
        assert not list(path.rglob("key")), "no private key was ever on the server"

        # The run goes on without a client whose key is revoked, and takes it back.
        assert "is revoked, its node is disconnected" in do("revoke", path, 1)
        deployment.wait(lambda: {"1": REVOKED} in refused(deployment, 0))
        before = wait_for_rounds(deployment, 2)
        assert refused(deployment, before) == [{"1": REVOKED}] * 2
        assert "key revoked" in do("status", path)
        do("admit", path, 1)
        deployment.wait(lambda: refused(deployment, len(deployment.lines()) - 1) == [{}])
        assert "its key was revoked there" in deployment.said("node-1")

        for place in (path, *machines):
            for file in files_in(place):
                if file.exists():
                    mode = stat.S_IMODE(file.lstat().st_mode)
                    assert not mode & 0o077, f"{file}: {mode:o}"
        names = {file.name for place in machines for file in files_in(place)}
        assert {"key", "node.toml", "client_states.sqlite"} <= names


def test_a_restarted_server_does_not_register_a_revoked_key(tmp_path: Path) -> None:
    with Deployment(tmp_path / "federation", three_nodes(*MANY), insecure=False) as deployment:
        path = deployment.folder.path
        deployment.serve()
        assert "3 nodes registered" in deployment.said("server")
        for command, state in (("revoke", EXCLUDED), ("admit", "registered"), ("revoke", EXCLUDED)):
            assert deployment.start(command, command, path, 2).wait(PATIENCE) == 0
            assert states(deployment)["node-2"] == state
        deployment.stop("server")
        deployment.serve()
        assert "2 nodes registered" in deployment.said("server")
        assert states(deployment)["node-2"] == EXCLUDED


def states(deployment: Deployment) -> dict[str, str]:
    """Return the states of all nodes that the server knows, by name."""
    return {node.name: node.status for node in Control(deployment.folder).all_nodes()}
