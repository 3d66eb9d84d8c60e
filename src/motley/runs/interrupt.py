"""Ctrl-C, which people press twice and `timeout` sends twice: the second must not break what the first one saves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 5.0
"""How long after the first Ctrl-C another one is not heard; from then on it interrupts the saving too."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let a block be interrupted once, with time for its `finally` clauses.

    Nothing changes outside of the main thread, or where Ctrl-C already means something else.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None or now - first > SECONDS:
            first = now
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
