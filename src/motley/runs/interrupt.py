"""Stop a run on SIGINT (Ctrl-C), SIGTERM (a cluster ends the job) and SIGHUP (the terminal closes).

A run that is interrupted saves a checkpoint before it ends. A second signal must not interrupt the
saving: people press Ctrl-C twice, `timeout` sends its signal twice, and a closing terminal sends
both SIGHUP and SIGTERM.
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

#: Signals within this many seconds of the first one are ignored. Later ones interrupt again.
GRACE_SECONDS = 5.0
#: The signals that stop a run, with Python's default handlers. A signal that has another handler is
#: left alone, such as SIGHUP under nohup.
DEFAULT_HANDLERS: dict[signal.Signals, Handler] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
if hasattr(signal, "SIGHUP"):  # not on Windows
    DEFAULT_HANDLERS[signal.SIGHUP] = signal.SIG_DFL


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first signal only, so that `finally` clauses can complete.

    Nothing changes outside the main thread, where Python allows no signal handlers, or for a signal
    that already has a handler.
    """
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None or now - first > GRACE_SECONDS:
            first = now
            signal.default_int_handler(number, frame)

    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number, default in DEFAULT_HANDLERS.items():
            if signal.getsignal(number) == default:
                signal.signal(number, interrupt)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, DEFAULT_HANDLERS[number])
