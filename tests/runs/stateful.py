"""A method with client state and server state, registered for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.methods import METHODS
from motley.runs.callbacks import Callback
from motley.runs.run import resume_run, start_run
from tests.conftest import tiny_config
from tests.engine.toy_methods import EveryHook
from tests.runs import crash
from tests.runs.crash import Fate

NAME = "stateful"


class Stateful(EveryHook):
    """`EveryHook` under another name."""


@contextmanager
def registered() -> Iterator[None]:
    """Register the method."""
    METHODS.register(NAME, "for tests")(Stateful)
    try:
        yield
    finally:
        del METHODS._entries[NAME]


class DieAt(Callback):
    """Kills the process, or raises KeyboardInterrupt, after a number of local updates."""

    def __init__(self, updates: int, *, killed: bool) -> None:
        self.updates_left, self.killed = updates, killed

    def on_client(self, client: int) -> None:
        self.updates_left -= 1
        if self.updates_left == 0:
            if self.killed:
                crash.kill_myself()
            raise KeyboardInterrupt


def run(folder: Path, overrides: tuple[str, ...], updates: int, killed: bool) -> None:
    """Start or resume a run, and stop it after a number of local updates (0: at its end)."""
    watchers = [DieAt(updates, killed=killed)] if updates else []
    if folder.exists():
        resume_run(folder, watchers)
    else:
        start_run(tiny_config(f"method.name={NAME}", *overrides), folder, watchers)


def run_registered(folder: Path, overrides: tuple[str, ...], updates: int, killed: bool) -> None:
    """Do the same in another process, in which the method is not registered yet."""
    with registered():
        run(folder, overrides, updates, killed)


def run_with_fate(folder: Path, overrides: tuple[str, ...], fate: Fate) -> None:
    """Resume a run that sends itself a signal."""
    fate.seal(folder)
    run_registered(folder, overrides, updates=0, killed=False)
