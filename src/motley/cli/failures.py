"""Turn exceptions into messages and exit statuses. Only this module does so.

status 1   a bug in Motley: the message says so and names a file with the traceback
status 2   something the user can fix: a wrong setting, a damaged file, a full disk, no memory, an
           exception in the user's own code or in a plug-in
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

from rich.text import Text
from safetensors import SafetensorError

from motley.cli.terminal import Console
from motley.core.errors import MotleyError
from motley.core.own_code import failure_in_own_code, own_files
from motley.limits import is_out_of_memory

#: If this environment variable is set, every failure also prints its traceback.
DEBUG = "MOTLEY_DEBUG"

#: Lower-case parts of torch's messages about numbers that are too large for it.
TOO_LARGE = ("overflow when unpacking", "without overflow")

#: Errors of writing to an open file. Python does not say to which one.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

#: Exceptions that file readers raise for damaged content.
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
    own_failure = failure_in_own_code(error)
    status = 2
    if own_failure is not None and not _is_explained_alone(error):
        message = f"{own_failure} {_save_traceback(error)}"
    elif message is None:
        message = _bug(error)
        status = 1
    if os.environ.get(DEBUG):
        _to_stderr("".join(traceback.format_exception(error)))
    _to_stderr(Text.assemble(("motley:", "bold red"), " ", message))
    return status


def _is_explained_alone(error: Exception) -> bool:
    """Tell whether a message needs no place in a user's code, even if the error passed it."""
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        return True
    return isinstance(error, MotleyError) or is_out_of_memory(error)


def explain(error: Exception) -> str | None:
    """Return the message for a failure the user can fix, or None for a bug in Motley."""
    if isinstance(error, MotleyError):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"there is not enough memory: {_first_line(error)} Try smaller values of "
            "training.batch_size, federation.clients, data.transform.resize or the model's width."
        )
    if isinstance(error, OverflowError) or any(part in str(error).lower() for part in TOO_LARGE):
        return f"a number in the configuration is too large to compute with: {_first_line(error)}"
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, sqlite3.Error):
        file = "clients/client_states.sqlite in the run's folder"
        return f"the clients' state ({file}) cannot be used: {_first_line(error)}"
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a path contains a null character."
    if isinstance(error, RecursionError) and _is_parsing(error):
        return "a JSON or TOML file, or a value, is nested too deeply to be read."
    if isinstance(error, DAMAGED):
        return f"a file cannot be read or written: {type(error).__name__}: {_first_line(error)}"
    return None


def _is_parsing(error: RecursionError) -> bool:
    """Tell whether Python's JSON or TOML parser recursed too deeply in a user's file."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("json", "tomllib"):
            return True
    return False


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None and error.errno in CANNOT_WRITE:
        return f"the standard output or a file cannot be written: {reason}."
    if error.filename is None:
        return f"a file or a connection cannot be used: {reason}."
    names = []
    for name in (error.filename, error.filename2):
        if isinstance(name, str | bytes):
            names.append(os.fsdecode(name))
    return f"{' -> '.join(names) or error.filename}: {reason}."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


def _bug(error: Exception) -> str:
    """Return the message about an unexpected exception, whose traceback is saved."""
    summary = f"{type(error).__name__}: {_first_line(error)}"
    files = own_files()
    if files:
        # A hook that forgets its `return`, for example, is only noticed in Motley's code.
        return (
            f"{summary} This is a bug in Motley, or code that the configuration names "
            f"({', '.join(files)}) returns something else than is expected. "
            f"{_save_traceback(error)}"
        )
    return (
        f"this is a bug in Motley, not in your input: {summary} {_save_traceback(error)} "
        "Please report it with the command you ran."
    )


def _save_traceback(error: Exception) -> str:
    """Write an exception's traceback to a file; return a sentence that names it."""
    text = f"motley {' '.join(sys.argv[1:])}\n\n" + "".join(traceback.format_exception(error))
    try:
        descriptor, name = tempfile.mkstemp(prefix="motley-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return f"The traceback is in {name}."
    except OSError:
        _to_stderr(text)
        return "The traceback is above."


def _to_stderr(text: str | Text) -> None:
    """Print to stderr. A failure is ignored: it may be redirected to the same full disk."""
    with suppress(OSError):
        Console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)


def flush_output() -> str | None:
    """Flush the standard output and return the reason if that fails.

    After a failure the output is redirected to /dev/null, because Python flushes again at exit and
    would then print a message of its own.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. This is not an error.
        _redirect_output_to_null()
    except (OSError, ValueError) as error:
        _redirect_output_to_null()
        return str(getattr(error, "strerror", None) or error)
    return None


def _redirect_output_to_null() -> None:
    with suppress(OSError, ValueError, io.UnsupportedOperation):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
