"""The process that answers a node's messages: it stays for the next one, and is replaced if it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.run import start_run
from tests.flower.grid import three_nodes
from tests.flower.processes import PATIENCE, Deployment

pytestmark = pytest.mark.slow

SETTINGS = (
    "method.name=scaffold",
    f"engine.flower.wait_s={PATIENCE}",
    f"engine.flower.timeout_s={PATIENCE}",
)


def edit(deployment: Deployment, client: int, more: str) -> None:
    """Add to the settings of a node."""
    file = deployment.folder.nodes / f"node-{client}" / "node.toml"
    kept = [line for line in file.read_text().splitlines() if line.partition(" ")[0] not in more]
    file.write_text("\n".join((more, *kept)) + "\n")


def answered(deployment: Deployment, client: int) -> int:
    """Return how many training messages a node has answered."""
    return deployment.said(f"node-{client}").count("motley: train message answered")


def test_workers_that_stay_and_workers_that_die(tmp_path: Path) -> None:
    """Client 0's worker is killed between messages, and client 1's stays for all of them.

    Client 2 has one process per message. The run ends with the local engine's bits.
    """
    settings = (*SETTINGS, "training.rounds=5")
    with Deployment(tmp_path / "federation", three_nodes(*settings), insecure=True) as deployment:
        edit(deployment, 2, "keep_alive_s = 0")
        deployment.serve()
        deployment.join(0, 1, 2)
        run = deployment.play()
        deployment.wait(lambda: answered(deployment, 1) >= 1 or run.poll() is not None)
        (steady,) = deployment.workers("node-1")
        deployment.wait(lambda: answered(deployment, 0) >= 1 or run.poll() is not None)
        (first,) = deployment.workers("node-0")
        os.kill(first, signal.SIGKILL)
        deployment.finish(run)
        (second,) = deployment.workers("node-0")
        assert second != first
        assert deployment.workers("node-1") == [steady]
        assert deployment.workers("node-2") == []
        server = load_checkpoint(deployment.folder.run / "checkpoints")
        lines = deployment.lines()
    assert not any("refused" in line or "repeated" in line for line in lines)
    _, local = start_run(three_nodes(*settings, "engine.name=local"), tmp_path / "local")
    assert server is not None and fingerprint(server.state) == fingerprint(local.state)


def test_a_worker_that_is_killed_at_work_costs_one_answer(tmp_path: Path) -> None:
    """The SuperNode misses its heartbeat and answers with an error; the next message gets a new worker."""
    settings = (*SETTINGS, "training.rounds=3", "training.steps=3", "server.min_fraction=0.5")
    app = "tests.flower.sleepy:app"
    with Deployment(
        tmp_path / "federation", three_nodes(*settings), insecure=True, nodes=app
    ) as deployment:
        deployment.serve()
        deployment.join(0, 1, 2)
        run = deployment.play()
        deployment.wait(
            lambda: "falling asleep" in deployment.said("node-1") or run.poll() is not None
        )
        (worker,) = deployment.workers("node-1")
        os.kill(worker, signal.SIGKILL)
        deployment.finish(run)
        lines = deployment.lines()
        assert deployment.workers("node-1") not in ([], [worker])
    assert [list(line.get("refused", {})) for line in lines] == [["1"], [], []]  # type: ignore[call-overload]


def test_a_worker_that_holds_too_much_memory_ends_after_its_message(tmp_path: Path) -> None:
    settings = (*SETTINGS, "training.rounds=2", "training.steps=1")
    with Deployment(tmp_path / "federation", three_nodes(*settings), insecure=True) as deployment:
        edit(deployment, 1, "max_idle_mb = 100.0")
        edit(deployment, 2, "keep_alive_s = 1.0")
        deployment.run()
        assert deployment.said("node-1").count("more than max_idle_mb = 100") >= 2
        assert deployment.workers("node-1") == []
        deployment.wait(lambda: deployment.workers("node-2") == [])
        assert len(deployment.workers("node-0")) == 1
        assert not any("refused" in line for line in deployment.lines())
