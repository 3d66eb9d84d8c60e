"""A run that is stopped at any moment and resumed ends bit-identical to one that never stopped."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.client.state_store import ClientStateStore
from motley.runs.checkpoint import checkpoints, fingerprint, load_checkpoint
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from motley.server.state import ServerState
from tests.conftest import TINY, tiny_config
from tests.runs import crash, stateful
from tests.runs.crash import Fate, InterruptAt

ROUNDS = 8
#: A run in which everything that is kept between rounds matters: EMA, InCo, augmentation, slots.
SETTINGS = (
    *TINY,
    f"training.rounds={ROUNDS}",
    "training.batch_size=64",
    "training.epochs=0.5",
    "run.checkpoint_every=2",
    "run.tensorboard=false",
    "engine.slots=2",
    "engine.threads=1",
    "engine.workers=1",
    "server.inco.variant=official",
    "server.ema_decay=0.9",
    "data.transform.crop_padding=1",
)


def saved(folder: Path) -> ServerState:
    server = load_checkpoint(folder / "checkpoints")
    assert server is not None
    return server


def rounds(folder: Path) -> list[int]:
    return [line["round"] for line in MetricsLog(folder / "metrics.jsonl").read()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without the times."""
    lines = MetricsLog(folder / "metrics.jsonl").read()
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def hashes(server: ServerState) -> list[object]:
    sections = (server.state, server.ema or {}, server.method_state)
    return [server.round_number, *map(fingerprint, sections), server.client_state_rounds]


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    assert hashes(saved(folder)) == hashes(saved(undisturbed))
    assert timeless(folder) == timeless(undisturbed)
    assert (folder / "config.toml").read_text() == (undisturbed / "config.toml").read_text()
    assert not [path for path in folder.rglob("*unfinished*") if path.parent.name == "checkpoints"]


# ---- the command, in processes that are killed


class Commands:
    """Calls the command `motley` on one run, each time in a new process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"

    def start(self, command: str, fate: Fate | None = None) -> Any:
        overrides = [argument for override in SETTINGS for argument in ("--set", override)]
        arguments = {
            "run": ["run", *overrides, "--out", str(self.folder)],
            "resume": ["resume", str(self.folder)],
            "show": ["show", str(self.folder)],
            "fingerprint": ["show", str(self.folder), "--fingerprint"],
        }[command]
        return crash.start(crash.motley, self.folder, arguments, fate)

    def say(self, command: str, code: int = 0) -> str:
        """Run a command to its end and return its output."""
        ended = crash.finish(self.start(command))
        said = (self.folder.parent / "said.txt").read_text()
        assert ended == code, said
        return said

    def again(self) -> str:
        """Return what a user types next: resume if the run exists, else run."""
        return "resume" if (self.folder / "config.toml").exists() else "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    commands = Commands(tmp_path_factory.mktemp("undisturbed") / "run")
    commands.say("run")
    assert rounds(commands.folder) == list(range(1, ROUNDS + 1))
    return commands.folder


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path / "run")


def test_kill_9_resume_and_the_same_fingerprint(commands: Commands, undisturbed: Path) -> None:
    """The promise as a user meets it: run, a kill in the middle, resume, show --fingerprint."""
    motley = [sys.executable, "-c", "from motley.cli import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    overrides = [argument for override in SETTINGS for argument in ("--set", override)]
    first = subprocess.Popen(
        [*motley, "run", *overrides, "--out", str(commands.folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(10),  # slow, so that this process sees its third round in time
    )
    while first.poll() is None and not (
        commands.metrics.exists() and len(rounds(commands.folder)) >= 3
    ):
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    subprocess.run(
        [*motley, "resume", str(commands.folder)], env=environment, check=True, capture_output=True
    )
    shown = subprocess.run(
        [*motley, "show", str(commands.folder), "--fingerprint"],
        env=environment,
        check=True,
        capture_output=True,
    )
    assert re.fullmatch(r"[0-9a-f]{64}\n", shown.stdout.decode())
    assert shown.stdout.decode() == Commands(undisturbed).say("fingerprint")
    assert_same_run(commands.folder, undisturbed)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again_at_any_moment(
    commands: Commands, undisturbed: Path, seed: int
) -> None:
    """Four kills, the first possibly before the run has started, the others after a resume."""
    moments = random.Random(seed)
    for wait_for in sorted(moments.sample(range(ROUNDS), 4)):
        process = commands.start(commands.again())
        crash.wait_for_rounds(commands.metrics, wait_for, process)
        time.sleep(moments.uniform(0, 0.25))
        process.kill()
        crash.finish(process)
    while commands.again() == "run" or saved_round(commands.folder) < ROUNDS:
        commands.say(commands.again())
    assert_same_run(commands.folder, undisturbed)


def saved_round(folder: Path) -> int:
    server = load_checkpoint(folder / "checkpoints")
    return server.round_number if server else 0


def test_killed_at_file_operations(commands: Commands, undisturbed: Path) -> None:
    """Each process is killed before a random operation on a file: config, metrics, checkpoint..."""
    moments = random.Random(3)
    saved_rounds = [0]
    for longest in (20, 20, 20, 70, 70, 70, 70, 70):
        ended = crash.finish(commands.start(commands.again(), Fate(moments.randint(1, longest))))
        saved_rounds.append(saved_round(commands.folder))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL, (commands.folder.parent / "said.txt").read_text()
    assert len(saved_rounds) > 5
    assert any(0 < number < ROUNDS for number in saved_rounds), "one process resumed in the middle"
    if ended:
        commands.say("resume")
    assert_same_run(commands.folder, undisturbed)


def test_ctrl_c_keeps_the_last_complete_round(commands: Commands, undisturbed: Path) -> None:
    """After the first line of metrics, and in a resumed run (which reads its metrics first)."""
    # A resumed run opens its metrics three times to check and to cut them, then for round 2, for
    # the checkpoint of round 2, and for round 3.
    for command, opened, completed in (("run", 1, 1), ("resume", 6, 3)):
        process = commands.start(command, Fate(opened, "metrics.jsonl", signal.SIGINT))
        assert crash.finish(process) == 130
        said = (commands.folder.parent / "said.txt").read_text()
        assert f"motley resume {commands.folder}" in said
        assert "Traceback" not in said
        assert saved_round(commands.folder) == completed, "also between checkpoint_every rounds"
        assert rounds(commands.folder) == list(range(1, completed + 1))
    metrics_before = commands.metrics.read_bytes()
    said = commands.say("resume")
    assert commands.metrics.read_bytes().startswith(metrics_before), (
        "saved rounds are not run again"
    )
    assert f"round {completed}/{ROUNDS}" not in said
    assert f"round {completed + 1}/{ROUNDS}" in said
    assert_same_run(commands.folder, undisturbed)


def test_without_a_checkpoint_it_starts_from_the_beginning(
    commands: Commands, undisturbed: Path
) -> None:
    assert crash.finish(commands.start("run", Fate(2, "metrics.jsonl"))) == -signal.SIGKILL
    assert rounds(commands.folder) == [1]
    assert checkpoints(commands.folder / "checkpoints") == []
    commands.say("resume")
    assert_same_run(commands.folder, undisturbed)


def test_a_live_run_is_not_resumed_and_a_folder_not_used_twice(commands: Commands) -> None:
    process = commands.start("run", Fate(2, "metrics.jsonl", signal.SIGSTOP))
    crash.wait_for_rounds(commands.metrics, 1, process)
    try:
        assert "being written by another process" in commands.say("resume", code=2)
        assert "already exists" in commands.say("run", code=2)
        assert "resnet18" in commands.say("show"), "reading is allowed"
        assert rounds(commands.folder) == [1]
    finally:
        process.kill()
        crash.finish(process)
    assert "1 of 8" in commands.say("show")


def test_a_finished_run_is_left_as_it_is(undisturbed: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        paths = [path for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before = files()
    said = Commands(undisturbed).say("resume")
    assert files() == before
    assert f"round {ROUNDS} of {ROUNDS}" in said
    assert f"round 1/{ROUNDS}" not in said


# ---- a method with client state and server state

FAST = (
    "training.batch_size=64",
    "training.epochs=0.5",
    "run.checkpoint_every=2",
    "run.tensorboard=false",
    "engine.workers=1",
)
#: With this limit, some client states stay in host memory and some do not.
STATEFUL = ("training.rounds=5", "engine.client_state_host_gib=0.0003", *FAST)
CLIENTS_PER_ROUND = 4  # as in TINY


@pytest.fixture(scope="module", autouse=True)
def registered_method() -> Iterator[None]:
    with stateful.registered():
        yield


@pytest.fixture(scope="module")
def stateful_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stateful") / "run"
    stateful.run(folder, STATEFUL, updates=0, killed=False)
    return folder


def client_states(folder: Path) -> dict[tuple[int, int], str]:
    """Return the hashes of the client states that the newest checkpoint refers to."""
    store = ClientStateStore(folder / "clients")
    hashes = {}
    for client, state_round in saved(folder).client_state_rounds.items():
        hashes[client, state_round] = fingerprint(store.get(client, state_round))
    return hashes


def assert_same_run_and_client_states(folder: Path, undisturbed: Path) -> None:
    assert_same_run(folder, undisturbed)
    assert client_states(folder) == client_states(undisturbed)


@pytest.mark.parametrize("updates", [1, 4, 6, 11, 17])
def test_interrupted_in_the_middle_of_a_round(
    tmp_path: Path, stateful_run: Path, updates: int
) -> None:
    """Clients of the interrupted round have saved new states. A resumed run must not use them."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as caught:
        stateful.run(folder, STATEFUL, updates, killed=False)
    assert saved(folder).round_number == (updates - 1) // CLIENTS_PER_ROUND
    resume_run(folder)
    assert_same_run_and_client_states(folder, stateful_run)
    assert caught.tb is not None, "keeps the interrupted run in memory until here, as in a notebook"


def test_killed_in_the_middle_of_rounds(tmp_path: Path, stateful_run: Path) -> None:
    """Killed in the first round, in a round right after a checkpoint, and in a later one."""
    folder = tmp_path / "run"
    for updates in (3, 2 * CLIENTS_PER_ROUND + 2, 2 * CLIENTS_PER_ROUND - 1):
        process = crash.start(stateful.run_registered, folder, STATEFUL, updates, True)
        assert crash.finish(process) == -signal.SIGKILL
    assert saved_round(folder) == 2
    resume_run(folder)
    assert_same_run_and_client_states(folder, stateful_run)


@pytest.mark.parametrize("at", [10, 14, 17, 20, 27])
def test_killed_while_client_states_and_checkpoints_are_saved(
    tmp_path: Path, stateful_run: Path, at: int
) -> None:
    """Killed before file operations of the second and third save, which begin at 10 and 20.

    The client states are on disk by then, and the checkpoint that refers to them is not. (Kills
    while client states are written: tests/engine/test_state_store.py.)
    """
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        stateful.run(folder, STATEFUL, 2 * CLIENTS_PER_ROUND + 1, killed=False)
    process = crash.start(stateful.run_with_fate, folder, STATEFUL, Fate(at))
    assert crash.finish(process) == -signal.SIGKILL
    resume_run(folder)
    assert_same_run_and_client_states(folder, stateful_run)


def test_client_states_of_an_incomplete_round_are_replaced(
    tmp_path: Path, stateful_run: Path
) -> None:
    """A kill between saving client states and the checkpoint leaves states of future rounds."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        stateful.run(folder, STATEFUL, 2 * CLIENTS_PER_ROUND + 1, killed=False)
    stale = ClientStateStore(folder / "clients")
    for number in (3, 4, 5):
        for client in range(6):
            stale.put(client, number, {"another": torch.tensor(number)})
        stale.save(dict.fromkeys(range(6), number))
    resume_run(folder)
    assert_same_run_and_client_states(folder, stateful_run)


def test_going_back_to_an_older_checkpoint(tmp_path: Path, stateful_run: Path) -> None:
    """The advice of the error about a damaged checkpoint works: older client states still exist."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        stateful.run(folder, STATEFUL, 4 * CLIENTS_PER_ROUND + 1, killed=False)
    _, newest = checkpoints(folder / "checkpoints")
    newest.rename(folder / "broken")
    assert saved(folder).round_number == 2
    resume_run(folder)
    assert_same_run_and_client_states(folder, stateful_run)


def test_client_states_that_no_checkpoint_refers_to_are_deleted(stateful_run: Path) -> None:
    """Rounds 2, 4 and 5 were saved, and 4 and 5 are kept.

    Each client keeps its newest state up to round 4 and its newest up to round 5.
    """
    names = [path.name for path in checkpoints(stateful_run / "checkpoints")]
    assert names == ["round-000004", "round-000005"]
    lines = MetricsLog(stateful_run / "metrics.jsonl").read()
    trained = {line["round"]: line["clients"] for line in lines}
    expected = set()
    for client in range(6):
        rounds_of_client = [number for number, clients in trained.items() if client in clients]
        up_to_4 = [number for number in rounds_of_client if number <= 4]
        if up_to_4:
            expected.add((client, max(up_to_4)))
        expected.add((client, max(rounds_of_client)))
    with sqlite3.connect(stateful_run / "clients" / "client_states.sqlite") as database:
        stored = set(database.execute("SELECT client, round FROM client_states"))
    assert stored == expected
    assert len(stored) < sum(map(len, trained.values()))


# ---- interruptions between rounds


def test_an_interruption_before_the_metrics_are_written_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MetricsLog.append

    def interrupted(log: MetricsLog, record: Any) -> None:
        if record.round_number == 2:
            raise KeyboardInterrupt
        append(log, record)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_run(tiny_config(*FAST), tmp_path / "run")
    resume_run(tmp_path / "run")
    assert rounds(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interruption_after_the_metrics_are_written_repeats_no_line(
    tmp_path: Path, at: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        start_run(tiny_config(*FAST), tmp_path / "run", [InterruptAt(at)])
    resume_run(tmp_path / "run")
    assert rounds(tmp_path / "run") == [1, 2, 3]


def test_the_engine_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    """The local and the debug engine compute the same bits, so a run may continue on the other."""
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    start_run(tiny_config(*FAST), plain)
    with pytest.raises(KeyboardInterrupt):
        start_run(tiny_config(*FAST), changed, [InterruptAt(2)])
    config = changed / "config.toml"
    config.write_text(config.read_text().replace('name = "local"', 'name = "debug"'))
    resume_run(changed)
    assert hashes(saved(changed)) == hashes(saved(plain))
