"""Write files completely or not at all, and check output paths before a long computation starts."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from motley.core.dotted import describe
from motley.core.errors import MotleyError

#: Characters that Markdown or HTML give a meaning to, and their replacements.
_MARKDOWN = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "\\`", "[": "\\[", "]": "\\]"}
)


def given_path(value: object, label: str) -> Path:
    """Return a caller's path, given as text or as a path. `label` names the argument."""
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise MotleyError(f"{label}: is {describe(value)}; a path is expected, as text or a Path.")


def markdown_text(text: str) -> str:
    """Escape a name, so that Markdown shows it literally and in one line.

    Names may come from files of others. A page that shows the Markdown would take tags in them for
    its own. Control characters become spaces.
    """
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown.translate(_MARKDOWN)


@contextmanager
def output_file(path: Path) -> Iterator[io.BytesIO]:
    """Open a file for writing, and replace the old one only if the block ends without an exception.

    Open it before a long computation, so that a path that cannot be written is reported at once.
    The block writes into memory. At the end, the content is written to a temporary file in the same
    folder, which then replaces the old file: at any moment either the old or the new content is
    there, and after an exception nothing is left behind. A symbolic link is followed, not replaced.
    Devices and pipes such as /dev/stdout are written to directly.
    """
    if path.is_dir():
        raise MotleyError(f"{path}: is a folder; give the name of a file.")
    content = io.BytesIO()
    if is_stream(path):
        # Append: standard output may be redirected to a file with >>, which must not be truncated.
        with _errors_named(path):
            stream = path.open("ab", buffering=0)
        with stream:
            yield content
            with _errors_named(path):
                _write_all(stream, content)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise MotleyError(f"{path}: cannot be written: there is no folder {target.parent}.")
    unfinished = target.with_name(target.name + ".unfinished")
    with _errors_named(path):
        file = unfinished.open("wb", buffering=0)
    try:
        with file:
            yield content
            with _errors_named(path):
                _write_all(file, content)
                os.fsync(file.fileno())
        with _errors_named(path):
            unfinished.replace(target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _write_all(file: io.FileIO, content: io.BytesIO) -> None:
    """Write everything. One write to an unbuffered file may accept only a part of the bytes."""
    remaining = content.getbuffer()
    while len(remaining):
        written = file.write(remaining) or 0
        remaining = remaining[written:]


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Name the output file in error messages. The error of a full disk, for one, does not."""
    try:
        yield
    except OSError as error:
        raise MotleyError(f"{path}: cannot be written: {error.strerror or error}.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at any moment either the old or the new content is there."""
    with output_file(path) as file:
        file.write(content)


def is_stream(path: Path) -> bool:
    """Return whether a path is a device or a pipe, which must be written to and never replaced.

    Everything under /dev and /proc counts: /dev/stdout is a link, possibly to a pipe without a
    name, which `exists` does not see.
    """
    if path.is_absolute() and path.parts[1:2] in (("dev",), ("proc",)) and not path.is_dir():
        return os.path.lexists(path)
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Create a folder and check that files can be written to it, before a long computation.

    If the block fails before anything was written, the folders that were created are removed again.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.append(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"some bytes, to detect a full disk")
    except FileExistsError:
        raise MotleyError(f"{path}: is a file; give the name of a folder.") from None
    except NotADirectoryError:
        raise MotleyError(f"{path}: cannot be created: a part of this path is a file.") from None
    except OSError as error:
        _remove_empty(missing)
        raise MotleyError(f"{path}: cannot be written: {error.strerror}.") from None
    try:
        yield path
    except BaseException:
        _remove_empty(missing)
        raise


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders in the given order, innermost first. Stop at the first that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def check_new_folder(path: Path) -> None:
    """Raise if a folder cannot be created at `path`, without creating it."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing != path and not existing.is_dir():
        raise MotleyError(f"{path}: cannot be created: {existing} is a file.")
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise MotleyError(f"{path}: cannot be created: {existing} is not writable.")


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. An unreadable or damaged file counts as empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read."""
    # Created with its final mode before there is anything to read in it.
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)
