"""A method whose clients and whose server both keep something, made known by name where it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.methods import METHODS
from motley.runs.play import Callback, begin, resume
from tests.conftest import tiny_config
from tests.engine.toy_methods import EveryHook
from tests.runs import crash
from tests.runs.crash import Fate

NAME = "remembering"


class Remembering(EveryHook):
    """Every hook, under a name of its own."""


@contextmanager
def registered() -> Iterator[None]:
    """Make the method known."""
    METHODS.register(NAME, "made up for tests")(Remembering)
    try:
        yield
    finally:
        del METHODS._entries[NAME]


class DieAt(Callback):
    """Dies, or is interrupted, after so many turns of clients."""

    def __init__(self, turns: int, *, killed: bool) -> None:
        self.left, self.killed = turns, killed

    def on_client(self, client: int) -> None:
        self.left -= 1
        if self.left == 0:
            if self.killed:
                crash.kill_myself()
            raise KeyboardInterrupt


def live(folder: Path, overrides: tuple[str, ...], turns: int, killed: bool) -> None:
    """Begin a run in a new folder, or go on with the one there, and end after so many turns (0: after the last)."""
    watchers = [DieAt(turns, killed=killed)] if turns else []
    if folder.exists():
        resume(folder, watchers)
    else:
        begin(tiny_config(f"method.name={NAME}", *overrides), folder, watchers)


def live_registered(folder: Path, overrides: tuple[str, ...], turns: int, killed: bool) -> None:
    """Do the same in a process of its own."""
    with registered():
        live(folder, overrides, turns, killed)


def live_with_fate(folder: Path, overrides: tuple[str, ...], fate: Fate) -> None:
    """Go on with a run until its fate."""
    fate.seal(folder)
    live_registered(folder, overrides, turns=0, killed=False)
