"""Worker processes: the same bits as one process, and every way in which they can end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.core.errors import MotleyError
from motley.core.own_code import RemoteError
from motley.engine.base import EngineSettings
from motley.engine.pool import SlotPool
from motley.engine.shared_memory import pack
from motley.engine.slots import Slot
from motley.engine.workers import (
    Result,
    WorkerPool,
    WorkerTask,
    bundle_size,
    dealt,
    is_worthwhile,
    is_worthwhile_in_background,
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
SHORT = ("training.rounds=3", "training.epochs=0.2", "training.batch_size=16")
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


@pytest.fixture(autouse=True)
def no_workers_of_other_tests() -> Iterator[None]:
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


def outcome(*overrides: str, folder: Path | None = None) -> tuple[object, ...]:
    """Return everything that a short run computes, but its times."""
    federation = Federation(tiny_config(*SHORT, *overrides), client_state_folder=folder)
    server = federation.initial_state()
    lines = []
    for _ in range(federation.config.training.rounds):
        server, record = federation.run_round(server)
        line = to_line(record)
        line.pop("seconds")
        lines.append(line)
    federation.end_workers()
    states = [fingerprint(server.state), fingerprint(server.ema or {})]
    states.append(fingerprint(server.method_state))
    stored = {}
    for client, number in server.client_state_rounds.items():
        if federation.method.requirements.client_state:
            stored[client] = fingerprint(federation.engine.clients.states.store.get(client, number))  # type: ignore[attr-defined]
    return lines, states, stored


def one_method_per_kind() -> list[str]:
    """Return a method for each combination of what its clients receive, keep and send."""
    names: dict[object, str] = {}
    for entry in METHODS:
        needs = entry.item.requirements
        kind = (
            needs.own_training,
            needs.client_state,
            needs.personal_model,
            needs.payload,
            needs.collection,
            needs.exchanges_weights,
            needs.client_public_data,
        )
        names.setdefault(kind, entry.name)
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


def test_the_same_workers_train_in_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    advance = Slot.advance

    def watched(slot: Slot) -> bool:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return advance(slot)

    monkeypatch.setattr(Slot, "advance", watched)
    federation = Federation(tiny_config(*SHORT, "engine.workers=2"))
    server, _ = federation.run_round(federation.initial_state())
    first = set(pids.read_text().split())
    pids.unlink()
    federation.run_round(server)
    assert set(pids.read_text().split()) == first
    assert len(first) == 2
    assert str(os.getpid()) not in first
    assert len(multiprocessing.active_children()) == 2
    federation.end_workers()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kept", [0, 2**28])
def test_a_worker_keeps_slots_of_several_sizes_if_they_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """The number of slots that a worker has changes no result."""
    monkeypatch.setattr("motley.engine.local.KEPT_BYTES", kept)
    counts = tmp_path / "counts"
    make_room = SlotPool.make_room

    def watched(pool: SlotPool, size: str, max_bytes: int) -> None:
        make_room(pool, size, max_bytes)
        with counts.open("a") as file:
            file.write(f"{len({slot.size for slot in pool} | {size})}\n")

    monkeypatch.setattr(SlotPool, "make_room", watched)
    settings = ("federation.clients_per_round=6",)
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)
    most = max(int(line) for line in counts.read_text().split())
    assert most == 1 if kept == 0 else most > 1


def test_workers_without_tasks_end_and_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.IDLE_S", 0.1)
    pool = pool_of(pid)
    first = {result.header for _, result in pool.run("task", numbers(4))}
    wait_until(lambda: not multiprocessing.active_children())
    second = {result.header for _, result in pool.run("task", numbers(4))}
    assert first and second and not first & second
    pool.close()


def test_a_worker_that_ends_while_it_is_given_a_task_is_replaced() -> None:
    """A worker that was idle for long ends by itself, perhaps just now."""

    def end_once(task: WorkerTask) -> Result:
        if task.header == 1 and not gate.exists():
            gate.touch()
            sys.exit(64)
        return echo(task)

    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "gate"
        results = dict(pool_of(end_once).run("task", numbers(4)))
    assert [results[number].header for number in range(4)] == [0, 1, 2, 3]


def test_a_task_that_ends_its_process_is_reported() -> None:
    with pytest.raises(MotleyError, match="a worker process ended with code 0"):
        list(pool_of(lambda task: sys.exit(0)).run("task", numbers(2)))


def test_workers_do_not_inherit_the_mode_of_the_moment_of_their_fork() -> None:
    """They may be forked by an evaluation under no_grad, or between two rounds."""

    def modes(task: WorkerTask) -> Result:
        return Result((torch.get_num_threads(), torch.is_grad_enabled()), {})

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            results = dict(pool_of(modes).run("task", numbers(2)))
    finally:
        torch.set_num_threads(threads)
    assert [result.header for result in results.values()] == [(1, True)] * 2


def test_a_worker_that_is_told_to_end_is_replaced(tmp_path: Path) -> None:
    """A service manager that stops a run sends SIGTERM to all of its processes."""
    gate = tmp_path / "gate"

    def end_once(task: WorkerTask) -> Result:
        if task.header == 1 and not gate.exists():
            gate.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return echo(task)

    results = dict(pool_of(end_once).run("task", numbers(4)))
    assert [results[number].header for number in range(4)] == [0, 1, 2, 3]


def test_a_function_that_is_registered_later_is_used() -> None:
    pool = pool_of(echo)
    list(pool.run("task", numbers(2)))
    pool.register("task", pid)
    assert os.getpid() not in {result.header for _, result in pool.run("task", numbers(2))}
    pool.close()


def test_another_thread_forks_workers_of_its_own() -> None:
    """Linux ends workers with the thread that has forked them."""
    pool = pool_of(pid)
    seen: list[set[int]] = []

    def run() -> None:
        seen.append({result.header for _, result in pool.run("task", numbers(4))})

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    run()
    assert not seen[0] & seen[1] and not seen[1] & seen[2]
    pool.close()


def test_many_jobs_go_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.local.WAVE", 1)
    settings = ("method.name=scaffold", "federation.clients_per_round=6")
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)


def test_the_expected_time_of_private_clients_is_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their updates report one step, however many they have taken."""
    expected: list[float] = []

    def noted(seconds: Sequence[float], workers: int) -> int:
        expected.extend(seconds)
        return 1

    # The clock of a worker goes on by a second per task.
    clock = count()
    monkeypatch.setattr("time.process_time", lambda: float(next(clock)))
    monkeypatch.setattr("motley.engine.local.bundle_size", noted)
    settings = ("privacy.clip=1.0", "privacy.noise=0.5", "model.sizes=['mlp1']", "engine.workers=2")
    federation = Federation(tiny_config(*settings, "training.steps=5", "evaluation.every=9"))
    server, _ = federation.run_round(federation.initial_state())
    expected.clear()
    federation.run_round(server)
    federation.end_workers()
    assert expected == pytest.approx([1.0] * 4)


@pytest.fixture
def in_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every worker half of a round's tasks at once."""
    monkeypatch.setattr("motley.engine.workers.BUNDLE_S", 1000.0)


@pytest.mark.parametrize("method", one_method_per_kind())
@pytest.mark.usefixtures("in_bundles")
def test_bundles_change_no_bit_of_a_method(method: str) -> None:
    """The clients of a bundle use one learner, one after the other, before their results are sent."""
    settings = (*chosen(method), "federation.clients_per_round=6", "evaluation.every=3")
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)


@pytest.mark.parametrize("case", ["private heads", "16-bit uploads", "personalized scores"])
@pytest.mark.usefixtures("in_bundles")
def test_bundles_change_no_bit_of_what_clients_are_asked(case: str) -> None:
    settings = (*COLLECTING[case], "federation.clients_per_round=6")
    assert outcome("engine.workers=2", *settings) == outcome("engine.workers=1", *settings)


def test_only_small_tasks_travel_in_bundles() -> None:
    assert bundle_size([0.5] * 100, 2) == 1
    assert bundle_size([0.001] * 100, 2) == 13  # four bundles of 13 ms for each worker
    assert bundle_size([0.0001] * 100, 2) == 50
    assert bundle_size([0.0001] * 3, 2) == 2
    assert bundle_size([0.0] * 16, 2) == 8
    assert bundle_size([], 2) == 1


@given(st.lists(st.integers(1, 9)), st.integers(1, 7))
def test_bundles_take_about_equally_long(seconds: list[int], bundle: int) -> None:
    longest_first = sorted(seconds, reverse=True)
    in_turns = dealt(longest_first, bundle)
    assert sorted(in_turns, reverse=True) == longest_first
    sums = [sum(in_turns[first : first + bundle]) for first in range(0, len(seconds), bundle)]
    if len(seconds) % bundle == 0 and sums:
        assert max(sums) - min(sums) <= max(seconds)


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
    assert not is_worthwhile([0.0001] * 1000, 2)  # sending so many small tasks takes as long


def test_tasks_run_in_the_background_if_that_saves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.engine.workers.OVERHEAD", 0.03)
    assert is_worthwhile_in_background([0.1, 0.1], 2)
    assert is_worthwhile_in_background([5.0], 2)
    assert not is_worthwhile_in_background([0.01, 0.01], 2)
    assert not is_worthwhile_in_background([5.0, 5.0], 1)


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
    """One size's evaluation waits for a file that is only written after round 2 has trained."""
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
    """Test batches for which the first who asks must wait until a file is there."""

    def __init__(self, batches: Any, gate: Path) -> None:
        self.batches, self.gate = batches, gate
        self.data, self.size = batches.data, batches.size

    def __iter__(self) -> Iterator[Any]:
        deadline = time.monotonic() + 60
        try:
            self.gate.with_name("first").touch(exist_ok=False)
        except FileExistsError:
            return iter(self.batches)
        while not self.gate.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return iter(self.batches)


def test_results_of_the_background_are_in_order() -> None:
    tasks = pool_of(echo).start("task", numbers(5))
    assert [result.header for result in tasks.results()] == [0, 1, 2, 3, 4]
    assert tasks.ready


def test_an_exception_in_the_background_is_raised_when_results_are_read() -> None:
    tasks = pool_of(failing(ValueError("wrong"))).start("task", numbers(3))
    wait_until(lambda: tasks.ready)
    assert not multiprocessing.active_children()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^wrong$"):
            tasks.results()


def test_a_worker_that_is_killed_in_the_background_is_reported() -> None:
    tasks = pool_of(suicidal).start("task", numbers(2))
    with pytest.raises(MotleyError, match=r"was killed by signal 9.*engine\.workers"):
        tasks.results()
    assert not multiprocessing.active_children()


def test_tasks_of_the_background_start_again_if_their_workers_are_ended() -> None:
    """A failure in the training must not lose the evaluation of the round before it."""
    pool = pool_of(echo)
    pool.register("fail", failing(ValueError("wrong")))
    tasks = pool.start("task", numbers(6))
    with pytest.raises(ValueError, match="wrong"):
        list(pool.run("fail", numbers(4)))
    assert not multiprocessing.active_children()
    assert [result.header for result in tasks.results()] == [0, 1, 2, 3, 4, 5]
    pool.close()


def test_the_background_comes_first(tmp_path: Path) -> None:
    """Scores of a round are shown, and its checkpoint saved, before the next one has ended."""
    order = tmp_path / "order"

    def note(task: WorkerTask) -> Result:
        with order.open("a") as file:
            file.write(f"{task.header}\n")
        return echo(task)

    pool = pool_of(note, workers=1)
    background = pool.start("task", numbers(3))
    list(pool.run("task", [WorkerTask(number, {}) for number in range(3, 6)]))
    assert background.ready
    assert order.read_text().split() == ["0", "1", "2", "3", "4", "5"]
    pool.close()


def test_tasks_whose_results_nobody_can_read_are_skipped(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def note(task: WorkerTask) -> Result:
        with begun.open("a") as file:
            file.write("x")
        return echo(task)

    pool = pool_of(note)
    tasks = pool.start("task", numbers(50))
    del tasks
    assert [number for number, _ in pool.run("task", numbers(1))] == [0]
    assert len(begun.read_text()) <= 3  # those of two workers that had begun, and the last one
    pool.close()


def test_a_fork_of_the_owner_does_not_end_the_workers() -> None:
    pool = pool_of(pid)
    before = {result.header for _, result in pool.run("task", numbers(4))}
    process = multiprocessing.get_context("fork").Process(target=pool.close)
    process.start()
    process.join()
    assert {result.header for _, result in pool.run("task", numbers(4))} == before
    pool.close()


def test_a_fork_of_the_owner_does_not_write_to_its_memory() -> None:
    pool = pool_of(slow_echo)
    list(pool.run("task", filled(7.0)))
    background = pool.start("task", filled(7.0))

    def run_here() -> None:
        list(pool.run("task", filled(-1.0)))

    process = multiprocessing.get_context("fork").Process(target=run_here)
    process.start()
    process.join()
    for result in background.results():
        assert (result.tensors["x"]["x"] == 7.0).all()
    pool.close()


def slow_echo(task: WorkerTask) -> Result:
    time.sleep(0.1)
    return echo(task)


def filled(value: float) -> list[WorkerTask]:
    return [WorkerTask(number, {"x": {"x": torch.full((1000,), value)}}) for number in range(4)]


@pytest.mark.usefixtures("alarms_interrupt")
def test_interruptions_lose_no_task() -> None:
    """Ctrl-C at random moments: what was started in the background is still computed."""
    random = torch.Generator().manual_seed(1)
    pool = pool_of(echo)
    for _ in range(60):
        background = pool.start("task", filled(3.0))
        seconds = 0.02 * torch.rand((), generator=random).item()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            for _ in range(1000):
                list(pool.run("task", filled(5.0), bundle=2))
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        results = background.results()
        assert [result.header for result in results] == [0, 1, 2, 3]
        assert all((result.tensors["x"]["x"] == 3.0).all() for result in results)
    pool.close()


@pytest.fixture
def alarms_interrupt() -> Iterator[None]:
    """Let a timer do as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield
    signal.signal(signal.SIGALRM, before)


def test_workers_end_with_the_last_reference_to_their_pool() -> None:
    pool = pool_of(echo)
    list(pool.run("task", numbers(2)))
    assert len(multiprocessing.active_children()) == 2
    del pool
    assert not multiprocessing.active_children()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- messages


def echo(task: WorkerTask) -> Result:
    return Result(task.header, task.tensors)


def pid(task: WorkerTask) -> Result:
    time.sleep(0.02)  # or one worker could be done with all tasks before the other one begins
    return Result(os.getpid(), {})


def pool_of(function: Callable[[WorkerTask], Result], workers: int = 2) -> WorkerPool:
    pool = WorkerPool(workers)
    pool.register("task", function)
    return pool


def numbers(count: int) -> list[WorkerTask]:
    return [WorkerTask(number, {}) for number in range(count)]


def test_tensors_keep_their_types_and_shapes() -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "bf16": torch.arange(6).to(torch.bfloat16).view(2, 3).T,
        "bool": torch.tensor([True, False]),
        "long": torch.tensor([[7]]),
        "empty": torch.empty(0, 4),
        "expanded": torch.ones(1).expand(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    pool = pool_of(echo)
    tasks = [WorkerTask(("a", number), {"one": tensors, "none": {}}) for number in range(3)]
    results = dict(pool.run("task", tasks))
    for number in range(3):
        assert results[number].header == ("a", number)
        assert list(results[number].tensors) == ["one", "none"]
        for name, tensor in results[number].tensors["one"].items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])
    pool.close()


@pytest.mark.parametrize("bundle", [1, 2, 3, 10, 100])
def test_all_results_come_from_bundles(bundle: int) -> None:
    pool = pool_of(echo)
    tasks = []
    for number in range(10):
        tasks.append(WorkerTask(number, {"x": {"x": torch.full((number,), float(number))}}))
    results = dict(pool.run("task", tasks, bundle))
    for number in range(10):
        assert results[number].header == number
        assert torch.equal(results[number].tensors["x"]["x"], tasks[number].tensors["x"]["x"])
    with pytest.raises(ValueError, match="wrong"):
        list(pool_of(failing(ValueError("wrong"))).run("task", tasks, bundle))
    pool.close()


def test_results_are_not_overwritten_by_later_ones() -> None:
    """A worker writes every result to the same memory, and tasks grow and shrink."""
    lengths = [3, 100_000, 5, 1_000_000, 7, 100_000, 2]
    tasks = []
    for number, length in enumerate(lengths):
        tasks.append(WorkerTask(number, {"x": {"x": torch.full((length,), float(number))}}))
    pool = pool_of(echo)
    for _ in range(2):
        results = dict(pool.run("task", tasks))
        background = pool.start("task", tasks[::-1])
        again = dict(pool.run("task", tasks))
        for number, length in enumerate(lengths):
            expected = torch.full((length,), float(number))
            assert torch.equal(results[number].tensors["x"]["x"], expected)
            assert torch.equal(again[number].tensors["x"]["x"], expected)
        for number, result in enumerate(background.results()):
            value = float(len(lengths) - 1 - number)
            assert (result.tensors["x"]["x"] == value).all()
    pool.close()


def test_a_tensor_of_several_tasks_is_written_once() -> None:
    weights = torch.randn(1000)
    other = torch.randn(1000)
    size, packed = pack([{"state": {"w": weights}}] * 5)
    assert 4000 <= size < 4100
    assert [len(new_tensors) for _, new_tensors in packed] == [1, 0, 0, 0, 0]
    size, packed = pack([{"state": {"w": weights}}, {"state": {"w": other, "part": weights[:10]}}])
    assert size >= 8040
    assert [len(new_tensors) for _, new_tensors in packed] == [1, 2]


def test_memory_that_is_not_used_any_more_is_returned() -> None:
    def num_handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:motley")

    of_other_tests = num_mapped()
    pool = pool_of(echo)
    list(pool.run("task", numbers(2)))
    handles, mapped = num_handles(), num_mapped()
    for length in range(1, 60):
        tensors = {"x": {"x": torch.zeros(1000 * length)}}
        list(pool.run("task", [WorkerTask(0, tensors), WorkerTask(1, tensors)]))
    # One arena here, and one in each of the two workers.
    assert num_handles() <= handles + 1
    assert num_mapped() <= mapped + 3
    for process in multiprocessing.active_children():
        in_worker = Path(f"/proc/{process.pid}/maps").read_text().count("memfd:motley")
        assert in_worker <= of_other_tests + 3
    pool.close()


# ---- ends


class UnsendableError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("no way")
        self.function = lambda: None


def failing(error: Exception) -> Callable[[WorkerTask], Result]:
    def fail(task: WorkerTask) -> Result:
        if task.header == 1:
            raise error
        return echo(task)

    return fail


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
    pool = pool_of(failing(error))
    with pytest.raises(raised, match=text) as info:
        list(pool.run("task", numbers(4)))
    assert isinstance(info.value.__cause__, RemoteError)
    assert "in fail" in str(info.value.__cause__)
    assert not multiprocessing.active_children()


def suicidal(task: WorkerTask) -> Result:
    if task.header == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(task)


def test_a_worker_that_is_killed_ends_the_round_with_a_message() -> None:
    with pytest.raises(MotleyError, match=r"was killed by signal 9.*engine\.workers"):
        list(pool_of(suicidal).run("task", numbers(4)))
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
    with pytest.raises(KeyboardInterrupt):
        list(pool_of(echo).run("task", numbers(2)))
    assert sent
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not multiprocessing.active_children()


ORPHANS = """
import os, time
import torch
from hypothesis import given
from hypothesis import strategies as st
from motley.engine.workers import Result, WorkerPool, WorkerTask

def sleep(task):
    print(os.getpid(), flush=True)
    time.sleep(60)
    return Result(None, {})

pool = WorkerPool(2)
pool.register("sleep", sleep)
list(pool.run("sleep", [WorkerTask(0, {}), WorkerTask(1, {})]))
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
