"""Open the user's files with limits on how much is read from them.

Data files may come from anywhere, so nothing in them is trusted: sizes are checked before memory is
allocated, and lines are read with a limit.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from motley.core.errors import MotleyError
from motley.limits import check_data

#: A line of a text file: a CSV row of 100,000 columns has about 1 MB.
MAX_LINE = 16_000_000
#: A file that is read as text. Larger tables should be Parquet or .npz files.
MAX_TEXT_BYTES = 8_000_000_000
MAX_COLUMNS = 100_000
#: Rows of a table, or examples of any other file.
MAX_ROWS = 500_000_000


def check_file(path: Path) -> None:
    """Raise unless `path` is a file that is not empty."""
    try:
        if path.is_dir():
            raise MotleyError(f"{path} is a folder; a file is expected.")
        if not path.exists():
            raise MotleyError(f"there is no file {path}.")
        if not path.is_file():
            raise MotleyError(f"{path} is not a regular file.")
        if path.stat().st_size == 0:
            raise MotleyError(f"{path} is empty.")
    except (OSError, ValueError) as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None


def encoding_of(path: Path, setting: str = "auto") -> str:
    """Return the name of a text file's encoding. The mark at the start of UTF-8 is skipped."""
    with path.open("rb") as file:
        start = file.read(4096)
    is_utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if setting == "auto":
        encoding = "utf-16" if is_utf16 else "utf-8-sig"
    else:
        encoding = "utf-8-sig" if setting == "utf-8" else setting
    if encoding != "utf-16" and b"\0" in start:
        raise MotleyError(
            f"{path} is not a text file: it has a null byte at position {start.index(0)}. "
            "If it is UTF-16 without a mark, set data.files.encoding = 'utf-16'."
        )
    return encoding


@contextmanager
def open_text(path: Path, setting: str = "auto") -> Iterator[TextIO]:
    """Open a text file. Errors of reading and decoding become messages that name the file."""
    check_file(path)
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise MotleyError(
                f"{path} has {size:,} bytes; text files of up to {MAX_TEXT_BYTES:,} are read. "
                "Save the data as Parquet or .npz."
            )
        check_data(f"{path}: its text", size)
        # newline="": the csv module wants line ends as they are. A lone CR also ends a line.
        with path.open(encoding=encoding_of(path, setting), newline="") as file:
            yield file
    except UnicodeError as error:
        raise MotleyError(
            f"{path} cannot be decoded: {error}. Save it as UTF-8, or name its encoding with "
            "data.files.encoding."
        ) from None
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None


def lines_of(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a text file; one that is longer than the limit is refused."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise MotleyError(
                f"{path}, line {number}: has more than {MAX_LINE:,} characters. Are the line ends "
                "missing?"
            )
        yield line
