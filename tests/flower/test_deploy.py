"""Real SuperLinks and SuperNodes on loopback: the local engine's bits, keys, and processes that die."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.flower.server import serve
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.run import start_run
from tests.flower.grid import Grid, in_round_1, three_nodes
from tests.flower.malicious import LATE_S, MISDEEDS
from tests.flower.processes import PATIENCE, Deployment
from tests.flower.twice import TWICE

WAITING = (
    f"engine.flower.wait_s={PATIENCE}",
    f"engine.flower.timeout_s={PATIENCE}",
    "server.min_fraction=0.5",
)
INCO = ("method.name=InCoAvg", *WAITING)


def local(folder: Path, *overrides: str) -> str:
    _, server = start_run(three_nodes(*overrides, "engine.name=local"), folder)
    return fingerprint(server.state)


def final(deployment: Deployment) -> str:
    server = load_checkpoint(deployment.folder.run / "checkpoints")
    assert server is not None
    return fingerprint(server.state)


@pytest.mark.parametrize(
    "insecure",
    [
        pytest.param(True, id="insecure", marks=pytest.mark.slow),
        pytest.param(False, id="with TLS and keys"),
    ],
)
def test_three_nodes_end_with_the_bits_of_the_local_engine(tmp_path: Path, insecure: bool) -> None:
    with Deployment(tmp_path / "federation", three_nodes(*INCO), insecure=insecure) as deployment:
        deployment.serve()
        stranger = (
            None
            if insecure
            else deployment.start("stranger", "node", deployment.stranger(), "--patience", 0)
        )
        deployment.join(0, 1, 2)
        deployment.finish(deployment.play())
        assert [line["round"] for line in deployment.lines()] == [1, 2, 3]
        assert not any("refused" in line or "repeated" in line for line in deployment.lines())
        assert final(deployment) == local(tmp_path / "local", *INCO)
        if stranger:
            assert stranger.wait(PATIENCE) == 2
            assert "refused the key of client 0. Either" in deployment.said("stranger")


@pytest.mark.slow
def test_a_run_that_cannot_begin_says_why_without_a_traceback(tmp_path: Path) -> None:
    """First there is no node; then there are all, but one of them states another client number."""
    settings = (*INCO, "engine.flower.wait_s=40")
    with Deployment(tmp_path / "federation", three_nodes(*settings), insecure=False) as deployment:
        deployment.serve()
        assert deployment.play().wait(PATIENCE) == 2
        waiting = "waiting for 3 of 3 nodes: 0, 1, 2\n"
        assert deployment.said("run").startswith(
            f"{waiting}motley: engine.flower.wait_s = 40: still waiting for"
        )
        file = deployment.folder.nodes / "node-2" / "node.toml"
        file.write_text(file.read_text().replace("client = 2", "client = 7"))
        deployment.join(0, 1, 2)
        deployment.wait(
            lambda: all("SuperNode ID" in deployment.said(f"node-{client}") for client in range(3))
        )
        assert deployment.play().wait(PATIENCE) == 2
        said = deployment.said("run")
        assert said.splitlines()[-1] == (
            "motley: engine.flower.wait_s = 40: no node came for client 2; a run begins with all of its clients."
        )
        assert (
            "in the node's log." in said and "client = 7" not in said
        )  # the text stays at the node
        reference = re.search(r"([0-9a-f]{8})[^\n]* in the node's log\.", said)
        assert reference is not None and reference[1] in deployment.said("node-2")
        assert "Traceback" not in said and "unhandled exception" not in said
        shown = deployment.start("status", "status", deployment.folder.path)
        assert shown.wait(PATIENCE) == 0
        assert re.search(r"│ 1 +│ node-1 │ resnet14 │ cpu +│ online", deployment.said("status"))


def runs_of(deployment: Deployment) -> set[str]:
    """Return Flower's numbers of the runs of which node 1 has played a round, or is at it."""
    return set(re.findall(r"RUN (\d+), ROUND \d", deployment.said("node-1")))


@pytest.mark.slow
def test_a_killed_server_resumes_and_a_killed_node_comes_back(tmp_path: Path) -> None:
    settings = (
        *INCO,
        "method.name=scaffold",
        "training.rounds=4",
        "server.attempts=20",
        "server.min_fraction=1",
    )
    with Deployment(tmp_path / "federation", three_nodes(*settings), insecure=True) as deployment:
        deployment.serve()
        deployment.join(0, 1, 2)
        deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1)
        deployment.kill("server")
        deployment.kill("run")
        before = runs_of(deployment)
        deployment.serve()
        run = deployment.play()
        deployment.wait(lambda: bool(runs_of(deployment) - before))
        deployment.kill("node-1")
        deployment.join(1)
        deployment.finish(run)
        assert [line["round"] for line in deployment.lines()] == [1, 2, 3, 4]
        assert any(
            list(reasons) == ["1"]
            for line in deployment.lines()
            for reasons in line.get("repeated", [])
        )  # type: ignore[attr-defined]
        assert final(deployment) == local(tmp_path / "local", *settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "number"),
    [(b"motley.deploy.superlink", signal.SIGTERM), (b"deploy\0server", signal.SIGKILL)],
    ids=["told", "without its parent"],
)
def test_a_server_that_ends_does_not_wait_for_a_run(
    tmp_path: Path, word: bytes, number: int
) -> None:
    """`motley deploy run` shows the run's output, an answer of the server that does not end."""
    config = three_nodes(*WAITING, "training.rounds=1000")
    with Deployment(tmp_path / "federation", config, insecure=True) as deployment:
        deployment.serve()
        deployment.join(0, 1, 2)
        deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1)
        # The process of the run is killed, so that nobody tells the SuperLink that the run has ended.
        kill_all(deployment, b"flwr-serverapp", signal.SIGKILL)
        ended = named(deployment, word)
        kill_all(deployment, word, number)
        if number == signal.SIGKILL:
            os.waitpid(*ended, 0)  # a SuperLink does not miss a parent that is a zombie
        end = time.monotonic() + 30
        while named(deployment, b"motley.deploy.superlink"):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert "Traceback" not in deployment.said("server")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_whose_superexec_ended_starts_another_one(tmp_path: Path, number: int) -> None:
    """Only the SuperExec starts runs. Without it, `motley deploy run` would wait in silence."""
    config = three_nodes(*WAITING, "training.rounds=1")
    with Deployment(tmp_path / "federation", config, insecure=True) as deployment:
        deployment.serve()
        deployment.wait(lambda: bool(named(deployment, b"flower-superexec")))
        kill_all(deployment, b"flower-superexec", number)
        deployment.join(0, 1, 2)
        deployment.finish(deployment.play())
        assert [line["round"] for line in deployment.lines()] == [1]
        assert "the SuperExec ended with status" in deployment.said("server")


def kill_all(deployment: Deployment, word: bytes, number: int) -> None:
    """Send a signal to all processes with a word in their command line."""
    for process in named(deployment, word):
        os.kill(process, number)


def named(deployment: Deployment, word: bytes) -> list[int]:
    """Return the processes with a word in their command line."""
    found = []
    for process in deployment.processes():
        with suppress(OSError):
            if word in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.slow
def test_a_real_node_with_another_misdeed_in_every_round(tmp_path: Path) -> None:
    """The rounds go on with the others, and the metrics have the reasons."""
    limits = ("engine.flower.max_reply_mib=1", f"engine.flower.timeout_s={LATE_S}")
    settings = (*INCO, f"training.rounds={len(MISDEEDS)}", *limits)
    nodes = "tests.flower.malicious:app"
    with Deployment(
        tmp_path / "federation", three_nodes(*settings), insecure=True, nodes=nodes
    ) as deployment:
        deployment.run()
        lines = deployment.lines()
        assert [list(line["refused"]) for line in lines] == [["1"]] * len(MISDEEDS)  # type: ignore[call-overload]
        for line, (_, reason) in zip(lines, MISDEEDS, strict=True):
            assert reason in line["refused"]["1"]  # type: ignore[index]
        server = load_checkpoint(deployment.folder.run / "checkpoints")
        assert server is not None and server.client_state_rounds == {
            0: len(MISDEEDS),
            2: len(MISDEEDS),
        }


@pytest.mark.slow
def test_only_the_first_of_a_real_nodes_two_answers_counts(tmp_path: Path) -> None:
    """The SuperLink refuses the second one, and the run ends as without it."""
    settings, nodes = (*INCO, "training.rounds=2"), "tests.flower.twice:app"
    with Deployment(
        tmp_path / "federation", three_nodes(*settings), insecure=False, nodes=nodes
    ) as deployment:
        deployment.run()
        said = re.findall(TWICE.format(r"(\w+)", r"(\d+)", r"(\d+)"), deployment.said("node-1"))
        refusals = [
            line
            for line in deployment.said("server").splitlines()
            if "Failed to store Message reply" in line
        ]
        assert [(first != "0", second) for _, first, second in said] == [(True, "0")] * 2
        assert all(any(message in line for line in refusals) for message, _, _ in said)
        assert [line["round"] for line in deployment.lines()] == [1, 2]
        assert not any("refused" in line or "repeated" in line for line in deployment.lines())
        assert final(deployment) == local(tmp_path / "local", *settings)


@pytest.mark.slow
def test_a_real_nodes_answer_that_is_announced_and_never_sent(grid: Grid, tmp_path: Path) -> None:
    """It delays the round as long as a missing answer, and the node takes part in the next one."""
    settings = (*INCO, "training.rounds=2", f"engine.flower.timeout_s={LATE_S}")
    nodes = "tests.flower.twice:half"
    with Deployment(
        tmp_path / "federation", three_nodes(*settings), insecure=False, nodes=nodes
    ) as deployment:
        deployment.run()
        lines = deployment.lines()
        reason = f"it announced an answer that did not come whole within {LATE_S:g} s (engine.flower.timeout_s)."
        assert [line.get("refused") for line in lines] == [{"1": reason}, None]
        assert lines[0]["seconds"]["train"] < LATE_S + 15  # type: ignore[index]
        grid.misdeeds[999] = in_round_1(lambda sent, reply: [])
        _, server = serve(
            grid, three_nodes(*settings, "engine.flower.timeout_s=1"), tmp_path / "silent"
        )
        assert server.client_state_rounds == {0: 2, 1: 2, 2: 2}
        assert final(deployment) == fingerprint(server.state)
