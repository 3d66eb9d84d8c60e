"""Processes that kill themselves at a chosen moment: a repeatable `kill -9`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from motley.runs.callbacks import Callback
from motley.server.record import RoundRecord
from motley.server.state import ServerState

_OPERATIONS = frozenset(("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"))


def kill_myself() -> None:
    """Send SIGKILL to this process: no handler runs and nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def watch_operations(folder: Path, before: Callable[[int], None], file: str = "") -> None:
    """Call `before(n)` before this process's n-th operation on a file or folder inside `folder`.

    With `file`, only operations on paths that end with it count. Deleting a tree names its files
    relative to an open folder, so deletions of that kind count wherever they happen. An audit hook
    cannot be removed, so this is only for processes that end soon.
    """
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _OPERATIONS:
            path = str(arguments[0])
            relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
            if (relative or path.startswith(str(folder))) and path.endswith(file):
                seen += 1
                before(seen)

    sys.addaudithook(hook)


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a fork of this process. Return its exit code; negative: the signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class InterruptAt(Callback):
    """Raises KeyboardInterrupt after a round, as Ctrl-C does."""

    def __init__(self, round_number: int) -> None:
        self.round_number = round_number

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if record.round_number == self.round_number:
            raise KeyboardInterrupt


# ---- whole runs: children of a process that has imported everything, so that they start quickly

_IMPORTED = ["motley.cli.run", "motley.cli.resume", "torch._dynamo"]
_parent = multiprocessing.get_context("forkserver")


def start(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Call a function of a module in a new process."""
    _parent.set_forkserver_preload(_IMPORTED)
    # Not a daemon, which may have no children: a run may train its clients in worker processes.
    process = _parent.Process(target=work, args=arguments)
    process.start()
    return process


@dataclass(frozen=True)
class Fate:
    """The signal that a process sends itself right before its n-th file operation.

    SIGINT is sent `later` seconds after it, in the middle of the computation. These are seconds of
    CPU time, so that the load of the machine makes no difference.
    """

    at: int
    file: str = ""
    signal: signal.Signals = signal.SIGKILL
    later: float = 0.02

    def seal(self, folder: Path) -> None:
        """Install the signal in this process."""
        watch_operations(
            folder, lambda number: self._strike() if number == self.at else None, self.file
        )

    def _strike(self) -> None:
        if self.signal == signal.SIGINT:
            signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_VIRTUAL, self.later)
        else:
            os.kill(os.getpid(), self.signal)


def motley(folder: Path, arguments: list[str], fate: Fate | None = None) -> None:
    """Run the command `motley`, with its output in said.txt beside the run's folder."""
    from motley.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fate is not None:
        fate.seal(folder)
    sys.argv = ["motley", *arguments]
    with (
        (folder.parent / "said.txt").open("w") as said,
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        main()


def finish(process: ForkServerProcess, seconds: float = 60) -> int:
    """Wait for a process and return its exit code."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still running after {seconds} s")
    return process.exitcode


def wait_for_rounds(
    metrics: Path, rounds: int, process: ForkServerProcess, seconds: float = 60
) -> None:
    """Return as soon as a run's metrics have `rounds` lines, or the process has ended."""
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.005)
