"""A full or read-only disk, or too little memory, ends a command with a message.

The folder of the run stays readable, and with space again the run continues bit-identically. Disks
are small file systems in memory, which only root may mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from motley.cli.failures import explain
from motley.config import load_config
from motley.core.errors import MotleyError
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import checkpoints, fingerprint, load_checkpoint, read_checkpoint
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from tests.cli.conftest import Answer, call
from tests.conftest import tiny_config

#: A run with client states, an EMA and TensorBoard, small enough for many trials.
SETTINGS = (
    "model.sizes=['mlp1','mlp2']",
    "federation.clients=3",
    "federation.clients_per_round=2",
    "training.rounds=3",
    "training.steps=1",
    "method.name=scaffold",
    "server.ema_decay=0.5",
    "evaluation.per_client=round",
    "evaluation.client_test_fraction=0.2",
    "run.checkpoint_every=1",
    "engine.workers=1",
)
KIB = 1024
#: Files and folders that messages name.
PLACES = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "client_states.sqlite",
    "checkpoints",
    "tensorboard",
)


class Disk:
    """A small disk, of which a file named ballast takes as much as a test wants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def leave(self, free: int) -> None:
        """Fill the disk so that this many bytes are free."""
        self.ballast.unlink(missing_ok=True)
        numbers = os.statvfs(self.path)
        with self.ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, numbers.f_bavail * numbers.f_frsize - free)

    def empty(self) -> None:
        """Remove the ballast."""
        self.ballast.unlink()

    def set_writable(self, writable: bool) -> None:
        """Let files be written, or not."""
        option = "remount,rw" if writable else "remount,ro"
        subprocess.run(["mount", "-o", option, str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a small disk cannot be mounted here: that takes root on Linux")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def train(path: Path, *more: str) -> Answer:
    words = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return call("run", "--preset", "digits-small", *words, "--out", path)


def result(path: Path) -> object:
    """Return what a run has computed."""
    server = load_checkpoint(path / "checkpoints")
    assert server is not None
    lines = MetricsLog(path / "metrics.jsonl").read()
    for line in lines:
        del line["seconds"]
    sections = (server.state, server.ema or {}, server.method_state)
    return server.round_number, list(map(fingerprint, sections)), lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(path).code == 0
    return path


def assert_message(answer: Answer, *parts: str) -> None:
    said = answer.err + answer.out
    assert answer.code == 2, answer
    assert "Traceback" not in said and "bug in Motley" not in said, said
    assert any(part in answer.err for part in parts), answer.err


FULL = ("No space left on device", "disk is full", "disk I/O error", "cannot be written")


def assert_readable(path: Path) -> None:
    """Check that every file of a run that was stopped can be read."""
    for checkpoint in checkpoints(path / "checkpoints"):
        read_checkpoint(checkpoint)
    MetricsLog(path / "metrics.jsonl").read()
    assert call("show", path).code == 0


def sizes_of_places(path: Path) -> list[int]:
    """Return numbers of free bytes with which a run stops at each of its files.

    Files take whole pages. The disk is full at the start of a page of each file, and in the middle
    of those that are written in several pieces.
    """
    total = sum(-(-file.stat().st_size // 4096) * 4 * KIB for file in path.rglob("*"))
    early = [number * 4 * KIB for number in range(8)]
    return early + [total * part // 12 // 4096 * 4096 for part in range(1, 11)]


@pytest.mark.parametrize("tensorboard", ["true", "false"])
def test_a_disk_that_is_full_anywhere_in_a_run(
    disk: Disk, undisturbed: Path, tensorboard: str
) -> None:
    """From the first file to the last: message, readable folder, and the same end as without it."""
    path = disk.path / "run"
    settings = f"run.tensorboard={tensorboard}"
    places = set()
    for free in sizes_of_places(undisturbed):
        disk.leave(free)
        answer = train(path, settings)
        if answer.code == 0:
            break
        assert_message(answer, *FULL)
        places.update(word for word in PLACES if word in answer.err)
        if path.exists():
            assert_readable(path)
        disk.empty()
        again = call("resume", path) if path.exists() else train(path, settings)
        assert again.code == 0, (free, again.err)
        assert result(path) == result(undisturbed), free
        shutil.rmtree(path)
    # Which file meets the end of the disk beside these two depends on the sizes of the others.
    assert {"config.toml", "environment.json"} < places


@pytest.mark.parametrize("round_number", [1, 2])
def test_a_disk_that_fills_up_later(disk: Disk, undisturbed: Path, round_number: int) -> None:
    """Another program takes the space while the run goes on: earlier checkpoints stay."""

    class FillUp(Callback):
        def on_round(self, server: object, record: object) -> None:
            if server.round_number == round_number:  # type: ignore[attr-defined]
                disk.leave(0)

    path = disk.path / "run"
    config = load_config(preset="digits-small", overrides=SETTINGS)
    with pytest.raises((MotleyError, OSError)) as raised:
        start_run(config, path, [FillUp()])
    assert explain(raised.value) is not None
    assert_readable(path)
    assert load_checkpoint(path / "checkpoints").round_number >= round_number  # type: ignore[union-attr]
    disk.empty()
    assert call("resume", path).code == 0
    assert result(path) == result(undisturbed)


OUTPUTS = {
    "report": lambda run, out: ("report", run, "-o", out / "page.html"),
    "export": lambda run, out: ("export", run, "--size", "mlp1", "-o", out / "model"),
    "analyze": lambda run, out: ("analyze", "sizes", run, "-o", out / "analysis"),
    "study": lambda run, out: ("study", "demo", "--out", out / "study"),
    "run": lambda run, out: ("run", "--preset", "digits-small", "--out", out / "new"),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_on_a_full_disk(disk: Disk, undisturbed: Path, command: str) -> None:
    for free in (0, 8 * KIB):
        disk.leave(free)
        assert_message(call(*OUTPUTS[command](undisturbed, disk.path)), *FULL)
        for left in disk.path.rglob("*"):
            assert not left.name.endswith(".unfinished")


@pytest.mark.parametrize("command", [*OUTPUTS, "resume", "export into the run"])
def test_an_output_on_a_read_only_disk(disk: Disk, undisturbed: Path, command: str) -> None:
    run = disk.path / "run"
    shutil.copytree(undisturbed, run)
    disk.set_writable(False)
    try:
        if command == "resume":
            arguments: tuple[object, ...] = ("resume", run, "--rounds", 4)
        elif command == "export into the run":
            arguments = ("export", run, "--size", "mlp1")
        else:
            arguments = OUTPUTS[command](undisturbed, disk.path)
        assert_message(call(*arguments), "Read-only file system", "is not writable")
    finally:
        disk.set_writable(True)
    assert result(run) == result(undisturbed)
    assert call("resume", run).code == 0


def test_a_run_on_a_read_only_disk_can_be_read(disk: Disk, undisturbed: Path) -> None:
    run = disk.path / "run"
    shutil.copytree(undisturbed, run)
    disk.set_writable(False)
    try:
        for arguments in (("show", run), ("show", run, "--json"), ("list", "runs", disk.path)):
            assert call(*arguments).code == 0
        out = undisturbed.parent / "page.html"
        assert call("report", run, "-o", out).code == 0
        assert call("analyze", "sizes", run, "-o", undisturbed.parent / "an").code == 0
    finally:
        disk.set_writable(True)


# ---- memory


class TakeAllMemory(Callback):
    """Asks for more memory than any machine has, after a number of local updates."""

    def __init__(self, updates: int) -> None:
        self.updates_left = updates

    def on_client(self, client: int) -> None:
        self.updates_left -= 1
        if self.updates_left == 0:
            torch.empty(10**15)


@pytest.mark.parametrize("updates", [1, 6, 8])
def test_too_little_memory_leaves_a_run_that_continues(tmp_path: Path, updates: int) -> None:
    settings = ("training.batch_size=64", "run.tensorboard=false", "training.steps=1")
    start_run(tiny_config(*settings), tmp_path / "plain")
    with pytest.raises(MotleyError) as raised:
        start_run(tiny_config(*settings), tmp_path / "run", [TakeAllMemory(updates)])
    assert "there is not enough memory" in (explain(raised.value) or "")
    assert_readable(tmp_path / "run")
    resume_run(tmp_path / "run")
    assert result(tmp_path / "run") == result(tmp_path / "plain")
