"""A ledger on disk: lines that are appended before something is sent, and never changed.

Every line is a JSON object that ends with a check value: a hash of the line and of the check value
before it. So a line that was edited, lost or moved is found. The number of lines is kept in a
second file, NAME.head, because a hash cannot tell that the last lines, or all of them, are missing.

A kill in the middle of an append leaves an incomplete last line. The update or model that it was
about had not been sent yet: a line is on disk before `append` returns. It is therefore ignored, and
removed by the next append.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from motley.core.errors import MotleyError
from motley.files import flush

try:
    import fcntl
except ImportError:  # Windows, where nothing stops two processes from appending at once
    fcntl = None  # type: ignore[assignment]

Entry = dict[str, Any]

#: Key of a line's check value, and its length in bytes.
CHECK, CHECK_BYTES = "check", 8


class LedgerFile:
    """A file of sealed JSON lines, which only its owner can read."""

    def __init__(self, path: Path, advice: str) -> None:
        """`advice`: for messages about a file that is damaged or missing."""
        self.path, self.advice = path, advice
        self.head = path.with_name(path.name + ".head")
        #: The entries that were read or appended so far, and the file's size then: while the size
        #: stays the same, nothing needs to be read again.
        self._entries: list[Entry] = []
        self._check = ""
        self._size = -1

    @property
    def exists(self) -> bool:
        """Whether anything was ever written, also if the file has been deleted since."""
        return self.path.exists() or self.head.exists()

    def read(self) -> Sequence[Entry]:
        """Return all entries, verified. Without the file there are none, unless it was deleted."""
        try:
            # The number of lines first: another process may add one between the two.
            written = self._written()
            size = self.path.stat().st_size if self.path.exists() else 0
            if size != self._size:
                self._verify(self.path.read_bytes() if size else b"")
        except OSError as error:
            raise MotleyError(f"{self.path}: cannot be read: {error.strerror}.") from None
        if len(self._entries) < written:
            raise MotleyError(
                f"{self.path}: has {len(self._entries)} complete lines, but {written} were "
                f"written ({self.head.name}). {self.advice}"
            )
        return self._entries

    def append(self, entry: Mapping[str, Any], check: Callable[[Sequence[Entry]], None]) -> None:
        """Add an entry. When this returns, it is on disk.

        `check` is called with all entries before, while no other process can add one. If it raises,
        nothing is added.
        """
        try:
            is_new = not self.path.exists()
            with self._locked() as descriptor:
                check(self.read())
                line, seal = _sealed(entry, self._check)
                # Remove an incomplete last line.
                os.ftruncate(descriptor, self._size)
                self._write(descriptor, line)
                self._entries.append(dict(entry))
                self._check, self._size = seal, self._size + len(line)
                self._write_head()
            if is_new:
                flush(self.path.parent)  # the file's name must survive a power failure, too
        except OSError as error:
            raise MotleyError(f"{self.path}: cannot be written: {error.strerror}.") from None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file for appending, created if necessary, and keep other processes out."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, line: bytes) -> None:
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):  # a full disk: leave no incomplete line
                os.ftruncate(descriptor, self._size)
            raise

    # ---- checking the files

    def _verify(self, content: bytes) -> None:
        """Read the complete lines of the file."""
        complete = content[: content.rfind(b"\n") + 1]
        entries: list[Entry] = []
        check = ""
        for number, line in enumerate(complete.splitlines(), start=1):
            entry = _opened(line, check)
            if entry is None:
                raise MotleyError(
                    f"{self.path}, line {number}: is damaged, or a line before it is missing. "
                    f"{self.advice}"
                )
            check = entry.pop(CHECK)
            entries.append(entry)
        self._entries, self._check, self._size = entries, check, len(complete)

    def _write_head(self) -> None:
        """Note the number of lines.

        It is not flushed: after a power failure the number may be too low, which is harmless. It is
        written over the old one, in a single write of always the same length.
        """
        descriptor = os.open(self.head, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{len(self._entries):019d}\n".encode())
        finally:
            os.close(descriptor)

    def _written(self) -> int:
        """Return the number of lines that was noted; 0 if it is not known."""
        text = self.head.read_text(errors="replace").strip() if self.head.exists() else ""
        return int(text) if text.isdecimal() and len(text) < 20 else 0


def _sealed(entry: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """Return an entry as a line with its check value, and the check value."""
    content = json.dumps(dict(entry), allow_nan=False)
    digest = hashlib.blake2b(f"{previous}{content}".encode(), digest_size=CHECK_BYTES)
    seal = digest.hexdigest()
    return (json.dumps({**entry, CHECK: seal}) + "\n").encode(), seal


def _opened(line: bytes, previous: str) -> Entry | None:
    """Return the entry of a line, with its check value; None if the line is not as it was written.

    It is written again for the comparison, so that not even a space can differ.
    """
    try:
        entry = json.loads(line)
        content = {name: value for name, value in entry.items() if name != CHECK}
        return entry if _sealed(content, previous)[0] == line + b"\n" else None
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
