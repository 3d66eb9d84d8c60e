"""A log with one JSON line per round, and a running checksum of its lines.

A checkpoint holds the checksum of the lines up to its round, so that a line that was lost, doubled
or edited afterwards is noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from motley.core.errors import MotleyError
from motley.files import flush, write_atomically


@dataclass(frozen=True)
class LogDigest:
    """The number of lines up to a round, and their checksum."""

    lines: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return asdict(self)


class LineDigest:
    """A running sha256 over lines. Blank lines and the kind of line ends make no difference."""

    def __init__(self) -> None:
        self.lines = 0
        self._hash = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Add a line."""
        text = line.strip()
        if text:
            self.lines += 1
            self._hash.update(text + b"\n")

    def value(self) -> LogDigest:
        """Return the checksum of all lines so far."""
        return LogDigest(self.lines, self._hash.hexdigest())


class LineLog:
    """A file to which one line per round is appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._running = LineDigest()
        #: Round -> checksum of all lines up to its own, for the lines that were written or kept.
        self._digests: dict[int, LogDigest] = {}

    def append_text(self, round_number: int, text: str) -> None:
        """Add the line of a round."""
        line = text.encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                try:
                    remaining = memoryview(line + b"\n")
                    while len(remaining):
                        remaining = remaining[file.write(remaining) or 0 :]
                except OSError:
                    # On a full disk, a part of a line must not stay: the next line would join it.
                    file.truncate(start)
                    raise
        except OSError as error:
            raise MotleyError(f"{self.path}: cannot be written: {error.strerror}.") from None
        self._running.add(line)
        self._digests[round_number] = self._running.value()

    def keep_texts(self, texts: Iterable[tuple[int, str]]) -> None:
        """Replace the file by these lines (round, text)."""
        self._running, self._digests = LineDigest(), {}
        content = bytearray()
        for round_number, text in texts:
            line = text.strip().encode()
            content += line + b"\n"
            self._running.add(line)
            self._digests[round_number] = self._running.value()
        write_atomically(self.path, bytes(content))

    def flush(self) -> None:
        """Wait until the lines are on disk."""
        if self.path.exists():
            try:
                flush(self.path)
            except OSError as error:
                raise MotleyError(f"{self.path}: cannot be written: {error.strerror}.") from None

    def digest(self, round_number: int) -> LogDigest:
        """Return the checksum of the lines up to a round."""
        rounds = [number for number in self._digests if number <= round_number]
        return self._digests[max(rounds)] if rounds else LineDigest().value()

    def digest_of_first(self, lines: int) -> LogDigest:
        """Return the checksum of the first lines of the file, as it is now."""
        digest = LineDigest()
        for line in self.read_bytes().split(b"\n"):
            if digest.lines == lines:
                break
            digest.add(line)
        return digest.value()

    def read_bytes(self) -> bytes:
        """Return the file's content; nothing if there is no file."""
        if not self.path.exists():
            return b""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise MotleyError(f"{self.path}: cannot be read: {error.strerror}.") from None

    def parse(self, parse_line: Callable[[str], Any], what: str) -> list[tuple[str, Any]]:
        """Return every line with the result of `parse_line`.

        `parse_line` raises ValueError with a reason. An incomplete last line, which a kill or a
        power failure leaves, is skipped.
        """
        *complete, rest = self.read_bytes().split(b"\n")
        lines = []
        for number, line in enumerate([*complete, rest], start=1):
            if not line and number > len(complete):
                continue
            try:
                text = line.decode()
                lines.append((text, parse_line(text)))
            except ValueError as error:
                if number > len(complete):
                    continue
                reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
                raise MotleyError(
                    f"{self.path}, line {number}: these are not {what}: {reason}. "
                    "Remove the line to continue."
                ) from None
        return lines
