"""The signals that stop a run: Ctrl-C, the signal by which a cluster ends a job, and that of a closed terminal.

Each of them stops a run, which then saves a checkpoint. A second signal must not break that: people press Ctrl-C twice,
`timeout` sends its signal twice, and a terminal that closes sends both SIGHUP and SIGTERM.
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

#: For so many seconds after the first signal others are ignored; later ones interrupt the saving too.
SECONDS = 5.0
#: The signals' default handlers. A signal with another one is left alone, such as SIGHUP under nohup.
USUAL: dict[signal.Signals, Handler] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
if hasattr(signal, "SIGHUP"):  # not on Windows
    USUAL[signal.SIGHUP] = signal.SIG_DFL


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
