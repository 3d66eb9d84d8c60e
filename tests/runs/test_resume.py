"""Whatever stops a run and whenever, resuming it ends where the undisturbed run ends: bit for bit, on a CPU."""

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

from motley.engine.memory import MemoryStore
from motley.round import Server
from motley.runs.checkpoint import checkpoints, fingerprint, load_checkpoint
from motley.runs.metrics import MetricsLog
from motley.runs.play import begin, resume
from tests.conftest import TINY, tiny_config
from tests.runs import crash, remembering
from tests.runs.crash import Fate, InterruptAt

ROUNDS = 8
SETTINGS = (
    *TINY,
    f"training.rounds={ROUNDS}",
    "training.batch_size=64",
    "training.epochs=0.5",
    "run.checkpoint_every=2",
    "run.tensorboard=false",
    "engine.slots=2",
    "engine.threads=1",
    "method.inco.variant=official",
    "server.ema_decay=0.9",
    "data.transform.crop_padding=1",
)
"""A run in which everything that is kept between rounds counts: averaging, InCo, augmentation, several slots."""


def saved(folder: Path) -> Server:
    server = load_checkpoint(folder / "checkpoints")
    assert server is not None
    return server


def rounds(folder: Path) -> list[int]:
    return [line["round"] for line in MetricsLog(folder / "metrics.jsonl").read()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without the seconds."""
    lines = MetricsLog(folder / "metrics.jsonl").read()
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def hashes(server: Server) -> list[object]:
    sections = (server.state, server.averaged or {}, server.method)
    return [server.round_number, *map(fingerprint, sections), server.remembered]


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    assert hashes(saved(folder)) == hashes(saved(undisturbed))
    assert timeless(folder) == timeless(undisturbed)
    assert (folder / "config.toml").read_text() == (undisturbed / "config.toml").read_text()
    assert not [path for path in folder.rglob("*unfinished*") if path.parent.name == "checkpoints"]


# ---- the command, in processes that are killed


class Commands:
    """The command `motley` on one run, a process each time."""

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
        """Run a command to its end and return what it said."""
        ended = crash.finish(self.start(command))
        said = (self.folder.parent / "said.txt").read_text()
        assert ended == code, said
        return said

    def again(self) -> str:
        """What a user types next: resume where a run has begun, else run."""
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
    """The promise as a user meets it: the installed command, a kill in the middle, resume, show --fingerprint."""
    motley = [sys.executable, "-c", "from motley.cli import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    overrides = [argument for override in SETTINGS for argument in ("--set", override)]
    first = subprocess.Popen(
        [*motley, "run", *overrides, "--out", str(commands.folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(10),  # it must not be at its end before this process sees its third round
    )
    while first.poll() is None and not (commands.metrics.exists() and len(rounds(commands.folder)) >= 3):
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    subprocess.run([*motley, "resume", str(commands.folder)], env=environment, check=True, capture_output=True)
    shown = subprocess.run(
        [*motley, "show", str(commands.folder), "--fingerprint"], env=environment, check=True, capture_output=True
    )
    assert re.fullmatch(r"[0-9a-f]{64}\n", shown.stdout.decode())
    assert shown.stdout.decode() == Commands(undisturbed).say("fingerprint")
    assert_same_run(commands.folder, undisturbed)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again_at_any_moment(commands: Commands, undisturbed: Path, seed: int) -> None:
    """Four kills, the first possibly before the run has begun, the others in the middle of a resumed one."""
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
    """Each life ends right before a file operation of its own: in a config, a line of metrics, a checkpoint, a lock."""
    moments = random.Random(3)
    began_after = [0]
    for longest in (20, 20, 20, 70, 70, 70, 70, 70):
        ended = crash.finish(commands.start(commands.again(), Fate(moments.randint(1, longest))))
        began_after.append(saved_round(commands.folder))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL, (commands.folder.parent / "said.txt").read_text()
    assert len(began_after) > 5
    assert any(0 < number < ROUNDS for number in began_after), "some life went on from the middle"
    if ended:
        commands.say("resume")
    assert_same_run(commands.folder, undisturbed)


def test_ctrl_c_keeps_the_last_whole_round(commands: Commands, undisturbed: Path) -> None:
    """In the round after the first line of metrics, and in a resumed run (which looks at its metrics first)."""
    for command, lines, whole in (("run", 1, 1), ("resume", 3, 3)):
        process = commands.start(command, Fate(lines, "metrics.jsonl", signal.SIGINT))
        assert crash.finish(process) == 130
        said = (commands.folder.parent / "said.txt").read_text()
        assert f"motley resume {commands.folder}" in said
        assert "Traceback" not in said
        assert saved_round(commands.folder) == whole, "not only what checkpoint_every had saved"
        assert rounds(commands.folder) == list(range(1, whole + 1))
    kept = commands.metrics.read_bytes()
    said = commands.say("resume")
    assert commands.metrics.read_bytes().startswith(kept), "rounds that were saved are not played again"
    assert f"round {whole}/{ROUNDS}" not in said
    assert f"round {whole + 1}/{ROUNDS}" in said
    assert_same_run(commands.folder, undisturbed)


def test_without_a_checkpoint_it_starts_from_the_beginning(commands: Commands, undisturbed: Path) -> None:
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
        assert "resnet18" in commands.say("show"), "looking is allowed"
        assert rounds(commands.folder) == [1]
    finally:
        process.kill()
        crash.finish(process)
    assert "1 of 8" in commands.say("show")


def test_a_finished_run_is_left_as_it_is(undisturbed: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        found = (path for path in undisturbed.rglob("*") if path.is_file() and path.name != ".lock")
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = files()
    said = Commands(undisturbed).say("resume")
    assert files() == before
    assert f"round {ROUNDS} of {ROUNDS}" in said
    assert f"round 1/{ROUNDS}" not in said


# ---- a method with memory at the clients and state at the server

FAST = ("training.batch_size=64", "training.epochs=0.5", "run.checkpoint_every=2", "run.tensorboard=false")
KEEPS = ("training.rounds=5", "engine.client_state_host_gib=0.0003", *FAST)
"""Some memories stay in host memory and some do not."""
TURNS = 4
"""Clients a round."""


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with remembering.registered():
        yield


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remembered") / "run"
    remembering.live(folder, KEEPS, turns=0, killed=False)
    return folder


def memories(folder: Path) -> dict[tuple[int, int], str]:
    """Return hashes of the memories that the newest checkpoint names."""
    store = MemoryStore(folder / "clients")
    return {which: fingerprint(store.get(*which)) for which in saved(folder).remembered.items()}


def assert_remembers_the_same(folder: Path, undisturbed: Path) -> None:
    assert_same_run(folder, undisturbed)
    assert memories(folder) == memories(undisturbed)


@pytest.mark.parametrize("turns", [1, TURNS, TURNS + 2, 3 * TURNS - 1, 4 * TURNS + 1])
def test_interrupted_in_the_middle_of_a_round(tmp_path: Path, remembered: Path, turns: int) -> None:
    """Clients of the broken round have trained and remembered; the resumed run must know nothing of it."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as caught:
        remembering.live(folder, KEEPS, turns, killed=False)
    assert saved(folder).round_number == (turns - 1) // TURNS
    resume(folder)
    assert_remembers_the_same(folder, remembered)
    assert caught.tb is not None, "all this while the broken run was still in memory, as in a notebook"


def test_killed_in_the_middle_of_rounds(tmp_path: Path, remembered: Path) -> None:
    """Without a moment to save anything: in the first round, in one after a checkpoint, in one long after."""
    folder = tmp_path / "run"
    for turns in (3, 2 * TURNS + 2, 2 * TURNS - 1):
        process = crash.start(remembering.live_registered, folder, KEEPS, turns, True)
        assert crash.finish(process) == -signal.SIGKILL
    assert saved_round(folder) == 2
    resume(folder)
    assert_remembers_the_same(folder, remembered)


@pytest.mark.parametrize("at", [10, 14, 17, 20, 27])
def test_killed_while_memories_and_checkpoints_are_saved(tmp_path: Path, remembered: Path, at: int) -> None:
    """Right before file operations of the second and third save, which begin at 10 and 20: the memories are durable
    by then, and the checkpoint that names them is not. (What a kill does to memories: tests/engine/test_memory.py.)
    """
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        remembering.live(folder, KEEPS, 2 * TURNS + 1, killed=False)
    process = crash.start(remembering.live_with_fate, folder, KEEPS, Fate(at))
    assert crash.finish(process) == -signal.SIGKILL
    resume(folder)
    assert_remembers_the_same(folder, remembered)


def test_memories_of_a_round_that_was_never_completed_are_replaced(tmp_path: Path, remembered: Path) -> None:
    """A kill between the clients' file and the checkpoint that names what is in it leaves rounds yet to be played."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        remembering.live(folder, KEEPS, 2 * TURNS + 1, killed=False)
    stale = MemoryStore(folder / "clients")
    for number in (3, 4, 5):
        for client in range(6):
            stale.put(client, number, {"another": torch.tensor(number)})
        stale.save(dict.fromkeys(range(6), number))
    resume(folder)
    assert_remembers_the_same(folder, remembered)


def test_going_back_to_an_older_checkpoint(tmp_path: Path, remembered: Path) -> None:
    """What the error about a broken checkpoint advises works: what the one before it names is still there."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        remembering.live(folder, KEEPS, 4 * TURNS + 1, killed=False)
    _, newest = checkpoints(folder / "checkpoints")
    newest.rename(folder / "broken")
    assert saved(folder).round_number == 2
    resume(folder)
    assert_remembers_the_same(folder, remembered)


def test_memories_that_no_kept_checkpoint_names_are_deleted(remembered: Path) -> None:
    """After rounds 2, 4 and 5 were saved, 4 and 5 are kept: a client's newest memory up to round 4, and that of 5."""
    assert [path.name for path in checkpoints(remembered / "checkpoints")] == ["round-000004", "round-000005"]
    trained = {line["round"]: line["clients"] for line in MetricsLog(remembered / "metrics.jsonl").read()}
    expected = set()
    for client in range(6):
        turns = [number for number, clients in trained.items() if client in clients]
        expected |= {
            (client, number) for number in (max((t for t in turns if t <= 4), default=0), max(turns)) if number
        }
    with sqlite3.connect(remembered / "clients" / "memories.sqlite") as database:
        found = set(database.execute("SELECT client, round FROM memories"))
    assert found == expected
    assert len(found) < sum(map(len, trained.values()))


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
            begin(tiny_config(*FAST), tmp_path / "run")
    resume(tmp_path / "run")
    assert rounds(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interruption_after_the_metrics_are_written_repeats_no_line(tmp_path: Path, at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(tiny_config(*FAST), tmp_path / "run", [InterruptAt(at)])
    resume(tmp_path / "run")
    assert rounds(tmp_path / "run") == [1, 2, 3]


def test_a_setting_of_the_engine_may_change_between_two_lives(tmp_path: Path) -> None:
    """Slots and debug compute the same, so a run may go on with another engine."""
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    begin(tiny_config(*FAST), plain)
    with pytest.raises(KeyboardInterrupt):
        begin(tiny_config(*FAST), changed, [InterruptAt(2)])
    config = changed / "config.toml"
    config.write_text(config.read_text().replace('name = "local"', 'name = "debug"'))
    resume(changed)
    assert hashes(saved(changed)) == hashes(saved(plain))
