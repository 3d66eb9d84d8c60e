"""Files that are there whole or not at all, whatever kills the process or the machine."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that, whatever happens, either the old or the new content is there."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, from its first moment on."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)
