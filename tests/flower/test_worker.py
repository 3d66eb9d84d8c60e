"""The process that answers a node's messages: it stays for the next one, and is replaced if it dies."""

from __future__ import annotations

import base64
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

from motley.deploy import worker
from motley.deploy.worker import (
    FROZEN_S,
    RECONNECT,
    DroppedError,
    Progress,
    Worker,
    WorkerError,
    WorkerSettings,
    run_tasks,
    task_client,
)
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.run import start_run
from tests.flower.failing import FAILURES
from tests.flower.grid import three_nodes
from tests.flower.processes import PATIENCE, Deployment

SETTINGS = (
    "method.name=scaffold",
    f"engine.flower.wait_s={PATIENCE}",
    f"engine.flower.timeout_s={PATIENCE}",
)
#: Seconds without progress that are allowed at client 1, and that a busy machine needs beside them.
STALL_S, SOON_S = 10.0, 40.0


def edit(deployment: Deployment, client: int, more: str) -> None:
    """Add to the settings of a node."""
    file = deployment.folder.nodes / f"node-{client}" / "node.toml"
    kept = [line for line in file.read_text().splitlines() if line.partition(" ")[0] not in more]
    file.write_text("\n".join((more, *kept)) + "\n")


def test_the_content_of_a_message_is_freed_when_it_is_not_used_any_more() -> None:
    """Without a pass over cyclic garbage, which may come after the training."""
    content = PullObjectResponse(object_found=True, object_content=bytes(1000)).SerializeToString()

    class SuperNode(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), SuperNode)
    Thread(target=server.serve_forever, daemon=True).start()
    client = task_client(f"127.0.0.1:{server.server_port}", "token")
    gc.collect()
    gc.disable()
    try:
        received = client.PullObject(PullObjectRequest())
        in_memory = [thing for thing in gc.get_objects() if type(thing) is httpx.Response]
    finally:
        gc.enable()
        client.close()
        server.shutdown()
        server.server_close()
    assert received.object_content == bytes(1000)
    assert not in_memory


def answered(deployment: Deployment, client: int) -> int:
    """Return how many training messages a node has answered."""
    return deployment.said(f"node-{client}").count("motley: train message answered")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_worker_that_fails_at_work_costs_one_answer(tmp_path: Path) -> None:
    """It is killed, has no memory left, hangs and is stopped; every time it is noticed.

    The next message gets a new worker, and the other clients are not affected.
    """
    rounds = len(FAILURES) + 1
    settings = (*SETTINGS, f"training.rounds={rounds}", "training.steps=3")
    app = "tests.flower.failing:app"
    with Deployment(
        tmp_path / "federation", three_nodes(*settings), insecure=True, nodes=app
    ) as deployment:
        edit(deployment, 1, f"stall_s = {STALL_S}")
        deployment.run()
        lines = deployment.lines()
        log = (deployment.folder.nodes / "node-1" / "node.log").read_text()
    refused = [line.get("refused", {}) for line in lines]
    assert [list(reasons) for reasons in refused] == [["1"]] * len(FAILURES) + [[]]
    for reasons, (_, kind) in zip(refused, FAILURES, strict=False):
        (reference,) = re.findall(rf"its node failed \({kind}\), see reference (\w+)", reasons["1"])
        assert f"failure {reference} ({kind}): " in log
    assert "the training process ended during a message: killed by SIGKILL." in log
    killed, exhausted, stalled, frozen, _ = (line["seconds"]["train"] for line in lines)
    assert max(killed, exhausted) < SOON_S
    assert max(stalled, frozen) < STALL_S + SOON_S


@pytest.mark.slow
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


# ---- without a federation


def test_a_worker_that_is_killed_is_noticed_at_once() -> None:
    """The process is real; the SuperNode, which it waits for in vain, is not there."""
    process = Worker("127.0.0.1:9", WorkerSettings(environment=os.environ))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as node:
        killer = Timer(0.5, os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerError, match="killed by SIGKILL") as failure:
            process.answer("token", node)
        node.kill()
    assert failure.value.kind in ("worker-died", "out-of-memory")
    assert not process.alive
    process.end()


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the node's loop."""
    made = Clock()
    monkeypatch.setattr(worker, "time", made)
    return made


def let_pass(clock: Clock, seconds: float, progress: Progress) -> None:
    """Let time pass, with the checks of the node's loop."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(clock.now + 1.0, end)
        progress.check(None)


def test_a_worker_that_computes_makes_progress_and_one_that_waits_does_not(clock: Clock) -> None:
    progress = Progress(stall_s=100.0)
    used_s = 5.0
    for _ in range(100):  # a tenth of a core
        let_pass(clock, 10.0, progress)
        used_s += 1.0
        progress.show(used_s)
    for _ in range(9):  # its signs of life alone
        let_pass(clock, 10.0, progress)
        used_s += 0.01
        progress.show(used_s)
    with pytest.raises(WorkerError, match=r"stall_s = 100: .* next to nothing") as failure:
        let_pass(clock, 10.1, progress)
    assert failure.value.kind == "stalled"


def test_a_silent_worker_is_given_up(clock: Clock) -> None:
    """It has longer until its first sign of life, in which Python starts."""
    progress = Progress(stall_s=1.0)
    let_pass(clock, worker.START_S, progress)
    with pytest.raises(WorkerError, match="no sign of life for 300 s"):
        let_pass(clock, 0.1, progress)
    progress = Progress(stall_s=1e9)
    progress.show(0.5)
    let_pass(clock, FROZEN_S, progress)
    with pytest.raises(WorkerError, match="no sign of life for 45 s"):
        let_pass(clock, 0.1, progress)


def test_a_worker_is_not_given_up_because_its_node_was_stopped(clock: Clock) -> None:
    progress = Progress(stall_s=100.0)
    progress.show(0.5)
    clock.now += 1000.0
    progress.check(None)
    with pytest.raises(WorkerError, match="no sign of life for 45 s"):
        let_pass(clock, FROZEN_S + 0.1, progress)


def test_work_ends_when_nobody_waits_for_it(clock: Clock, grid: object) -> None:
    """`grid` sets Flower's identity of this process, without which there is no message."""
    message = Message(RecordDict(), 7, "train", ttl=30.0)
    message.metadata.created_at = clock.now
    progress = Progress(stall_s=1e9)
    clock.now += 30.0
    progress.check(message)
    clock.now += worker.LATE_S + 0.1
    with pytest.raises(WorkerError, match="no longer waits"):
        progress.check(message)


def test_the_task_of_an_unknown_message_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker died while it fetched. Flower answers if it misses the task, not if it is done."""
    finished: list[object] = []
    monkeypatch.setattr(worker, "fetch_without_content", lambda client: None)
    monkeypatch.setattr(worker, "push_task_output", lambda *about: finished.append(about))
    worker.answer_with_error("127.0.0.1:9", "token", None, "worker-died 0123abcd")
    assert not finished


FAKE = """#!/bin/sh
# A worker that gets a message's token and reports what a test wants it to.
read line
{reports}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: object) -> Callable[[str], None]:
    """Return a function that makes workers a script with these reports; {fetched} is one of them."""
    message = message_to_proto(Message(RecordDict(), 7, "train", ttl=600.0))
    fetched = f"echo fetched {base64.b64encode(message.SerializeToString()).decode()}"

    def use(reports: str) -> None:
        script = tmp_path / "worker"
        script.write_text(FAKE.format(reports=reports.format(fetched=fetched)))
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return use


@pytest.mark.parametrize("arrives", [False, True])
def test_a_message_that_was_dropped_while_it_arrived_makes_room_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, fake: Callable[[str], None], arrives: bool
) -> None:
    """The SuperNode hands out one message at a time: if there is another one, it dropped the first."""
    fake("{fetched}; echo arrived; sleep 0.5; echo stays" if arrives else "{fetched}; read line")
    monkeypatch.setattr(worker, "ANOTHER_S", 0.1)
    process = Worker("127.0.0.1:9", WorkerSettings(environment=os.environ))
    with subprocess.Popen(["sleep", "60"]) as node:
        try:
            if arrives:
                assert process.answer("first", node, lambda: "second")
            else:
                with pytest.raises(DroppedError) as dropped:
                    process.answer("first", node, lambda: "second")
                assert dropped.value.next_token == "second"
        finally:
            node.kill()
            process.end()


class Source:
    """A SuperNode's messages: there is one."""

    address = "127.0.0.1:9"

    def connect(self) -> Source:
        return self

    def close(self) -> None:
        pass


@pytest.mark.parametrize("sending", [False, True])
def test_a_supernode_with_half_an_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, fake: Callable[[str], None], sending: bool
) -> None:
    """It would wait for the rest of the answer for ever, and answer no other message."""
    fake("{fetched}; echo arrived; " + ("echo sending; " if sending else "") + "exit 1")
    tokens = ["first"]
    errors: list[str] = []
    monkeypatch.setattr(worker, "next_task", lambda client: tokens.pop() if tokens else "")
    with subprocess.Popen(["sleep", "60"]) as node:

        def note(*about: object) -> None:
            errors.append(str(about[-1]))
            node.kill()

        monkeypatch.setattr(worker, "answer_with_error", note)
        code = run_tasks(node, Source(), WorkerSettings(environment=os.environ))  # type: ignore[arg-type]
    assert (code == RECONNECT) == sending
    assert bool(errors) != sending
    assert node.returncode == (-signal.SIGTERM if sending else -signal.SIGKILL)


class Refusing(BaseHTTPRequestHandler):
    """A SuperNode that has forgotten all tasks."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(401)

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def test_a_worker_whose_message_was_given_up_ends_without_a_traceback() -> None:
    """It may have been stopped for longer than the SuperNode waits for its heartbeat."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "motley.deploy.task", address, worker.CLIENT_APP, "inf"]
    try:
        done = subprocess.run(
            command, input="token 0.0\n", capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        server.shutdown()
    assert "Traceback" not in done.stderr
