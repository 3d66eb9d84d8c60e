"""Worker processes: the same bits as one process, and every way in which they can end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.core.errors import MotleyError
from motley.engine.base import EngineSettings
from motley.engine.workers import (
    BackgroundTasks,
    Result,
    WorkerError,
    background_workers,
    forked_workers,
    is_worthwhile,
    num_workers,
)
from motley.federation import Federation
from motley.methods import METHODS
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import to_line
from motley.runs.run import run_rounds
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import chosen, tiny_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are for Linux")

CPU = [torch.device("cpu")]
SHORT = ("training.rounds=2", "training.epochs=0.2", "training.batch_size=16")
COLLECTING = {
    "statistics": ("server.statistics.name=recalibrate",),
    "client scores": ("evaluation.per_client=all", "evaluation.client_test_fraction=0.2"),
    "personalized scores": (
        "evaluation.per_client=all",
        "evaluation.client_test_fraction=0.2",
        "evaluation.personalize_epochs=0.2",
    ),
    "private heads": ("split.private=['head']", "evaluation.clients=all", "server.ema_decay=0"),
    "16-bit uploads": ("uplink.dtype=bf16",),
    "privacy": (
        "privacy.clip=1.0",
        "privacy.noise=0.5",
        "model.resnet.norm=group",
        "split.normalization_statistics=shared",
    ),
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use workers although these rounds are too short for them."""
    monkeypatch.setattr("motley.engine.workers.OVERHEAD", -1.0)


def outcome(*overrides: str, folder: Path | None = None) -> tuple[object, ...]:
    """Return everything that a short run computes, but its times."""
    federation = Federation(tiny_config(*SHORT, *overrides), memory_folder=folder)
    server = federation.initial_state()
    lines = []
    for _ in range(federation.config.training.rounds):
        server, record = federation.run_round(server)
        line = to_line(record)
        line.pop("seconds")
        lines.append(line)
    states = [fingerprint(server.state), fingerprint(server.ema or {})]
    states.append(fingerprint(server.method_state))
    stored = {}
    for client, number in server.client_state_rounds.items():
        if federation.method.requirements.client_state:
            stored[client] = fingerprint(federation.engine.clients.memory.get(client, number))  # type: ignore[attr-defined]
    return lines, states, stored


def one_method_per_kind() -> list[str]:
    """Return a method for each combination of requirements: they decide what travels."""
    names = {}
    for entry in METHODS:
        names.setdefault(entry.item.requirements, entry.name)
    return list(names.values())


@pytest.mark.parametrize("method", one_method_per_kind())
def test_workers_change_no_bit_of_a_method(method: str) -> None:
    settings = (*chosen(method), "evaluation.every=2")
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)


@pytest.mark.parametrize("case", COLLECTING)
def test_workers_change_no_bit_of_what_clients_are_asked(case: str) -> None:
    settings = COLLECTING[case]
    assert outcome("engine.workers=3", *settings) == outcome("engine.workers=1", *settings)


def test_states_on_disk_are_read_by_the_process_that_owns_the_file(tmp_path: Path) -> None:
    settings = ("method.name=scaffold", "engine.client_state_host_gib=0", "training.rounds=3")
    serial = outcome("engine.workers=1", *settings, folder=tmp_path / "one")
    assert outcome("engine.workers=2", *settings, folder=tmp_path / "two") == serial


def test_clients_really_train_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tiny_config(*SHORT, "engine.workers=2"))
    seen: set[int] = set()
    train = federation.engine._train_alone  # type: ignore[attr-defined]

    def watched(job: object) -> Result:
        result: Result = train(job)
        return Result((*result.header, os.getpid()), result.tensors)

    monkeypatch.setattr(federation.engine, "_train_alone", watched)
    results = federation.engine._in_workers(  # type: ignore[attr-defined]
        federation.jobs(federation.initial_state()), watched
    )
    for _, result in results:
        seen.add(result.header[-1])
    assert len(seen) == 2
    assert os.getpid() not in seen
    assert not multiprocessing.active_children()


def test_many_jobs_go_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.local.WAVE", 1)
    settings = ("method.name=scaffold", "federation.clients_per_round=6")
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)


# ---- the number of workers


def test_zero_is_one_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.available_cores", lambda: 7)
    assert num_workers(EngineSettings(), CPU) == 7
    assert num_workers(EngineSettings(workers=3), CPU) == 3
    for settings in ({"threads": 2}, {"compile": True}, {"name": "debug"}):
        assert num_workers(EngineSettings.model_validate(settings), CPU) == 1
    assert num_workers(EngineSettings(), CPU * 2) == 1


def test_a_daemonic_process_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.available_cores", lambda: 7)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def count() -> None:
        there.send(num_workers(EngineSettings(), CPU))

    process = context.Process(target=count, daemon=True)
    process.start()
    assert here.recv() == 1
    process.join()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"threads": 2}, "engine.threads = 2"),
        ({"compile": True}, "engine.compile = true"),
        ({"name": "debug"}, "engine.name = 'debug'"),
    ],
)
def test_workers_that_cannot_be_used_are_refused(settings: dict[str, object], reason: str) -> None:
    engine = EngineSettings.model_validate({"workers": 2, **settings})
    with pytest.raises(MotleyError, match=f"engine.workers = 2: {reason}"):
        num_workers(engine, CPU)


def test_workers_are_used_only_if_they_save_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.OVERHEAD", 0.03)
    assert is_worthwhile([1.0, 1.0], 2)
    assert not is_worthwhile([1.0, 1.0], 1)
    assert not is_worthwhile([5.0], 2)
    assert not is_worthwhile([0.01] * 4, 2)
    assert not is_worthwhile([5.0, 0.01], 2)  # the longest task alone takes as long


def test_tasks_run_in_the_background_if_that_saves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.OVERHEAD", 0.03)
    assert background_workers([0.1, 0.1], 2) == 1
    assert background_workers([5.0], 2) == 1
    assert background_workers([5.0, 5.0, 5.0], 2) == 2
    assert background_workers([5.0, 5.0, 5.0], 16) == 3
    assert background_workers([0.01, 0.01], 2) == 0
    assert background_workers([5.0, 5.0], 1) == 0


# ---- in the background


def test_a_run_evaluates_in_the_background_with_the_same_records() -> None:
    lines = {}
    for workers in (1, 2):
        settings = ("training.rounds=4", "training.epochs=0.2", f"engine.workers={workers}")
        federation = Federation(tiny_config(*settings))
        watcher = KeepLines()
        run_rounds(federation, federation.initial_state(), [watcher])
        lines[workers] = watcher.lines
    assert [line["round"] for line in lines[2]] == [1, 2, 3, 4]
    assert lines[2] == lines[1]
    assert not multiprocessing.active_children()


class KeepLines(Callback):
    """Keeps what metrics.jsonl would have, but the times."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        line = to_line(record)
        line.pop("seconds")
        self.lines.append(line)


def test_training_goes_on_while_a_round_is_evaluated(tmp_path: Path) -> None:
    """The evaluation of round 1 waits for a file that is only written after round 2 has trained."""
    federation = Federation(tiny_config(*SHORT, "engine.workers=2"))
    gate = tmp_path / "gate"
    federation.evaluator.batches  # noqa: B018 (put on the device before it is exchanged)
    federation.evaluator.batches = WaitingBatches(federation.evaluator.batches, gate)
    server, first = federation.queue_round(federation.initial_state())
    assert not first.ready
    server, second = federation.queue_round(server)
    assert not first.ready
    gate.touch()
    assert set(first.read().scores) == set(second.read().scores) == set(federation.split.sizes)


class WaitingBatches:
    """Test batches that are there once a file is."""

    def __init__(self, batches: Any, gate: Path) -> None:
        self.batches, self.gate = batches, gate
        self.data, self.size = batches.data, batches.size

    def __iter__(self) -> Iterator[Any]:
        deadline = time.monotonic() + 60
        while not self.gate.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return iter(self.batches)


def test_results_of_the_background_are_in_order() -> None:
    tasks = BackgroundTasks(echo, count=5, workers=2)
    assert [result.header for result in tasks.results()] == [0, 1, 2, 3, 4]
    assert tasks.ready
    assert not multiprocessing.active_children()


def test_an_exception_in_the_background_is_raised_when_results_are_read() -> None:
    tasks = BackgroundTasks(failing(ValueError("wrong")), count=3, workers=2)
    wait_until(lambda: tasks.ready)
    assert not multiprocessing.active_children()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^wrong$"):
            tasks.results()


def test_a_worker_that_is_killed_in_the_background_is_reported() -> None:
    tasks = BackgroundTasks(suicidal, count=2, workers=2)
    with pytest.raises(MotleyError, match=r"was killed by signal 9.*engine\.workers"):
        tasks.results()
    assert not multiprocessing.active_children()


def test_workers_of_the_background_end_with_their_last_reference() -> None:
    tasks = BackgroundTasks(sleep, count=2, workers=2)
    assert len(multiprocessing.active_children()) == 2
    # A fork drops its copy of the object, and must not end the workers of this process.
    context = multiprocessing.get_context("fork")
    process = context.Process(target=tasks._end)
    process.start()
    process.join()
    assert len(multiprocessing.active_children()) == 2
    del tasks
    assert not multiprocessing.active_children()


def sleep(number: int) -> Result:
    time.sleep(60)
    return Result(None, {})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- ends


def echo(number: int) -> Result:
    return Result(
        number, {"values": {"x": torch.full((2, 3), float(number)), "no": torch.empty(0)}}
    )


def test_results_keep_their_types_and_shapes() -> None:
    def task(number: int) -> Result:
        tensors = {
            "scalar": torch.tensor(1.5),
            "bf16": torch.arange(6).to(torch.bfloat16).view(2, 3).T,
            "bool": torch.tensor([True, False]),
            "long": torch.tensor([[7]]),
            "empty": torch.empty(0, 4),
        }
        return Result(("a", number), {"one": tensors, "none": {}})

    expected = task(0).tensors["one"]
    with forked_workers(task, 2) as workers:
        results = dict(workers.run(3))
    for number in range(3):
        assert results[number].header == ("a", number)
        assert list(results[number].tensors) == ["one", "none"]
        for name, tensor in results[number].tensors["one"].items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name])


class UnsendableError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("no way")
        self.function = lambda: None


def failing(error: Exception) -> Callable[[int], Result]:
    def task(number: int) -> Result:
        if number == 1:
            raise error
        return echo(number)

    return task


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (MotleyError("a message"), MotleyError, "^a message$"),
        (ValueError("wrong"), ValueError, "^wrong$"),
        (UnsendableError(), RuntimeError, "UnsendableError: no way"),
    ],
)
def test_an_exception_of_a_worker_is_raised_here(
    error: Exception, raised: type[Exception], text: str
) -> None:
    with pytest.raises(raised, match=text) as info, forked_workers(failing(error), 2) as workers:
        list(workers.run(4))
    assert isinstance(info.value.__cause__, WorkerError)
    assert "in task" in str(info.value.__cause__)
    assert not multiprocessing.active_children()


def suicidal(number: int) -> Result:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(number)


def test_a_worker_that_is_killed_ends_the_round_with_a_message() -> None:
    message = r"was killed by signal 9.*engine\.workers"
    with pytest.raises(MotleyError, match=message), forked_workers(suicidal, 2) as workers:
        list(workers.run(4))
    assert not multiprocessing.active_children()


def test_an_interruption_ends_the_workers() -> None:
    federation = Federation(tiny_config("training.rounds=1", "engine.workers=2"))
    server = federation.initial_state()

    def interrupt(client: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run_round(server, interrupt)
    assert not multiprocessing.active_children()
    after, _ = federation.run_round(server)
    other = Federation(tiny_config("training.rounds=1", "engine.workers=1"))
    expected = run_rounds(other, other.initial_state(), [])
    assert fingerprint(after.state) == fingerprint(expected.state)


def test_a_signal_during_a_fork_is_not_lost() -> None:
    """Python runs functions after a fork, and drops exceptions that are raised in them."""
    sent: list[bool] = []

    def send() -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    os.register_at_fork(after_in_parent=send)
    with pytest.raises(KeyboardInterrupt), forked_workers(echo, 2) as workers:
        list(workers.run(2))
    assert sent
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not multiprocessing.active_children()


ORPHANS = """
import os, time
import torch
from motley.engine.workers import Result, forked_workers

def task(number):
    print(os.getpid(), flush=True)
    time.sleep(60)
    return Result(None, {})

with forked_workers(task, 2) as workers:
    list(workers.run(2))
"""


def test_workers_die_with_the_process_that_forked_them() -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(worker) for worker in workers)


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
