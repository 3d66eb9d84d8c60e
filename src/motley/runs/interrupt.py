"""Ctrl-C, which people press twice and `timeout` sends twice, and the signal by which a cluster ends a job.

Either one stops a run, which then saves what it has; a second one must not break that.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers

SECONDS = 5.0
"""How long after the first signal another one is not heard; from then on it interrupts the saving too."""
USUAL: dict[signal.Signals, Handler] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What these signals do where nobody has said otherwise."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let a block be interrupted once, as by Ctrl-C, with time for its `finally` clauses.

    Nothing changes outside of the main thread, or for a signal that already means something else.
    """
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None or now - first > SECONDS:
            first = now
            signal.default_int_handler(number, frame)

    main = threading.current_thread() is threading.main_thread()
    heard = [number for number, usual in USUAL.items() if main and signal.getsignal(number) == usual]
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, USUAL[number])
