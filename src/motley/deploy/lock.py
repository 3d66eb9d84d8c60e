"""A lock file that keeps two processes from using one node's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.core.errors import MotleyError

try:
    import fcntl
except ImportError:  # Windows, where the server refuses a node that is started twice
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold a lock until this process ends, so that only one process uses a node's folder."""
    try:
        file = lock.open("a")
    except OSError as error:
        raise MotleyError(f"{lock.parent}: cannot be written to: {error.strerror}.") from None
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MotleyError(
                f"{lock.parent}: this node is already running on this machine."
            ) from None
        yield


def is_locked(lock: Path) -> bool:
    """Tell whether a process on this machine uses a node's folder."""
    if not lock.exists():
        return False
    try:
        with only_one(lock):
            return False
    except MotleyError:
        return True
