"""Turn exceptions into messages and exit statuses: the only place where the command line does so.

status 1   a bug in Motley: the message says so and names a file with the traceback
status 2   something the user can mend: a wrong setting, a damaged file, a full disk, too little memory
"""

from __future__ import annotations

import csv
import errno
import io
import json
import lzma
import os
import pickle
import sqlite3
import struct
import sys
import tempfile
import tomllib
import traceback
import zipfile
import zlib
from contextlib import suppress

from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError

from motley.core.errors import MotleyError
from motley.limits import is_out_of_memory

#: With this environment variable set, every failure also prints its traceback.
DEBUG = "MOTLEY_DEBUG"

#: Parts of messages, in lower case, by which torch says that it cannot compute with a number.
TOO_LARGE = ("overflow when unpacking", "without overflow")

#: Errors of writing; Python does not say to which file, only that of opening one does.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

#: Exceptions that readers of files raise when the content is not what it should be.
DAMAGED = (
    SafetensorError,
    UnicodeDecodeError,
    json.JSONDecodeError,
    tomllib.TOMLDecodeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    pickle.UnpicklingError,
    struct.error,
    csv.Error,
    EOFError,
)


def handle(error: Exception) -> int:
    """Print the message of a failed command to stderr and return its exit status."""
    message = explain(error)
    status = 2
    if message is None:
        message = _bug(error)
        status = 1
    if os.environ.get(DEBUG):
        _to_stderr("".join(traceback.format_exception(error)))
    _to_stderr(Text.assemble(("motley:", "bold red"), " ", message))
    return status


def explain(error: Exception) -> str | None:
    """Return the message of a failure that is not a bug in Motley, or None if it is one."""
    if isinstance(error, MotleyError):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"there is not enough memory: {_first_line(error)} Smaller values of training.batch_size, "
            "federation.clients, data.transform.resize or the model's width need less."
        )
    if isinstance(error, OverflowError) or any(part in str(error).lower() for part in TOO_LARGE):
        return f"a number in the configuration is too large to compute with: {_first_line(error)}"
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, sqlite3.Error):
        return f"the clients' state (clients/memories.sqlite in the run's folder) cannot be used: {_first_line(error)}"
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a path contains a null character."
    if isinstance(error, DAMAGED):
        return f"a file cannot be read or written: {type(error).__name__}: {_first_line(error)}"
    return None


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None and error.errno in CANNOT_WRITE:
        return f"the standard output or a file cannot be written: {reason}."
    if error.filename is None:
        return f"a file or a connection cannot be used: {reason}."
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return f"{' -> '.join(names) or error.filename}: {reason}."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


def _bug(error: Exception) -> str:
    """Write the traceback of an unexpected exception to a file, and return a message that names it."""
    text = f"motley {' '.join(sys.argv[1:])}\n\n" + "".join(traceback.format_exception(error))
    try:
        descriptor, name = tempfile.mkstemp(prefix="motley-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"The traceback is in {name}."
    except OSError:
        _to_stderr(text)
        where = "The traceback is above."
    said = f"{type(error).__name__}: {_first_line(error)}"
    return f"this is a bug in Motley, not in your input: {said} {where} Please report it with the command you ran."


def _to_stderr(text: str | Text) -> None:
    """Print to stderr, if anybody can still read it: it may be on the same full disk as the output."""
    with suppress(OSError):
        Console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)


def flush_output() -> str | None:
    """Write what is left of the standard output; if that fails, return why, and leave nothing for a second failure.

    Python flushes again at its exit and would print its own complaint then, so the output is pointed at nothing.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _point_output_at_nothing()  # the reader has left, as `head` does: that is no failure of ours
    except (OSError, ValueError) as error:
        _point_output_at_nothing()
        return str(getattr(error, "strerror", None) or error)
    return None


def _point_output_at_nothing() -> None:
    with suppress(OSError, ValueError, io.UnsupportedOperation):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
