"""Download a data set's published files, verify them, and unpack archives.

A download is written to a file that ends in .part and continues there after an interruption. It
gets its final name when its checksum is right. Archives are unpacked into a folder that ends in
.part, which gets its final name when it is complete. So a file or folder with its final name is
complete.
"""

from __future__ import annotations

import hashlib
import http.client
import posixpath
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.core.errors import MotleyError, unknown
from motley.data.sources import SOURCES, RemoteFile

#: Called with "downloading FILE" or "unpacking FILE", the bytes that are done and, if it is known,
#: their total.
Report = Callable[[str, int, int | None], None]

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30
#: How often a cut connection is resumed without having received anything.
MAX_IDLE_TRIES = 3
#: Limits on the files that a server or an archive may make us write. CINIC-10's archive, the
#: largest, has 0.7 GB and 270,000 files.
MAX_DOWNLOAD_BYTES = 4_000_000_000
MAX_UNPACKED_BYTES = 8_000_000_000
MAX_MEMBERS = 500_000
USER_AGENT = "motley"


class _UnreachableError(Exception):
    """An address cannot be reached, or does not have the file."""


class _CutError(Exception):
    """The connection ended before the file did."""


def fetch(name: str, root: Path, report: Report = lambda *_: None) -> Path:
    """Download a data set below `root`, unless it is there, and return its folder.

    Files that were put there by hand are verified and, if they are archives, unpacked.
    """
    if name not in SOURCES:
        raise MotleyError(unknown("data set to download", name, SOURCES))
    source = SOURCES[name]
    folder = source.folder_in(root)
    if folder is not None:
        for file in source.files:
            if file.unpack is None and (folder / file.name).is_file():
                _verify(folder / file.name, file.checksum)
        return folder
    if source.by_hand:
        raise MotleyError(f"data set {name!r} cannot be downloaded.\n" + instructions(name, root))
    with _disk_errors(root):
        for file in source.files:
            place = source.place_of(file, root)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_file():
                _verify(place, file.checksum)
            else:
                try:
                    _download(file, place, report)
                except _UnreachableError as error:
                    raise MotleyError(
                        f"data set {name!r} could not be downloaded: {error}.\n"
                        + instructions(name, root)
                    ) from None
            if file.unpack is not None:
                _unpack(place, root / source.folder, file.unpack, report)
                place.unlink()
    folder = source.folder_in(root)
    if folder is None:
        raise MotleyError(
            f"data set {name!r}: its files were downloaded to {root / source.folder}, but they "
            "are not those that the reader expects."
        )
    return folder


def instructions(name: str, root: Path) -> str:
    """Say which files to put where, for machines without a network."""
    source = SOURCES[name]
    if source.by_hand:
        return f"Put its files below {root}. {source.by_hand}"
    lines = ["On a machine without a network, copy these files from elsewhere:"]
    for file in source.files:
        algorithm, _, checksum = file.checksum.partition(":")
        lines.append(f"  {source.place_of(file, root)}")
        lines.append(f"      from {file.addresses[0]} ({algorithm} {checksum})")
    action = "unpack" if any(file.unpack is not None for file in source.files) else "check"
    lines.append(f"Then the same command will {action} them.")
    return "\n".join(lines)


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Name the folder in errors of the file system, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise MotleyError(f"{error.filename or root}: {error.strerror or error}.") from None


# ---- downloads


def _download(file: RemoteFile, place: Path, report: Report) -> None:
    """Download a file to `place`, from the first of its addresses that has it."""
    problems = []
    for address in file.addresses:
        try:
            _download_from(address, file, place, report)
            return
        except _UnreachableError as error:
            problems.append(f"{address}: {error}")
    raise _UnreachableError("; ".join(problems))


def _download_from(address: str, file: RemoteFile, place: Path, report: Report) -> None:
    partial = place.with_name(place.name + ".part")
    resumed = partial.exists()
    _receive_all(address, file.name, partial, report)
    if resumed and not _matches(partial, file.checksum):
        # The beginning may be of another version of the file, or damaged. Start over once.
        partial.unlink()
        _receive_all(address, file.name, partial, report)
    if not _matches(partial, file.checksum):
        actual = _digest(partial, file.checksum)
        partial.unlink()
        raise _UnreachableError(
            f"it has the wrong checksum {actual}, not {file.checksum}, and was not kept"
        )
    partial.replace(place)


def _receive_all(address: str, name: str, partial: Path, report: Report) -> None:
    """Append to `partial` until the file is complete. Continue where a connection was cut."""
    idle_tries = 0
    while True:
        before = _size_of(partial)
        try:
            _receive(address, name, partial, report)
            return
        except _CutError as error:
            idle_tries = idle_tries + 1 if _size_of(partial) <= before else 0
            if idle_tries >= MAX_IDLE_TRIES:
                raise _UnreachableError(
                    f"{error}; {_size_of(partial):,} bytes are kept, and the same command "
                    "continues from there"
                ) from None


def _receive(address: str, name: str, partial: Path, report: Report) -> None:
    """Make one request, and write the answer."""
    start = _size_of(partial)
    headers = {"User-Agent": USER_AGENT}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            if start and not _continues(response, start):
                start = 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdecimal() else None
            task = f"downloading {name}"
            _write_body(response, partial, start, total, lambda done: report(task, done, total))
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return  # The partial file is complete, or wrong. The checksum will tell.
        raise _UnreachableError(f"the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise _UnreachableError(str(error.reason)) from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _CutError(f"the connection was cut ({error or type(error).__name__})") from None


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Return whether a server sends the rest of a file. Some ignore the request for a range."""
    sent_range = response.headers.get("Content-Range", "")
    return response.status == http.HTTPStatus.PARTIAL_CONTENT and sent_range.strip().startswith(
        f"bytes {start}-"
    )


def _write_body(
    response: http.client.HTTPResponse,
    partial: Path,
    start: int,
    total: int | None,
    report: Callable[[int], None],
) -> None:
    done = start
    with partial.open("ab" if start else "wb") as output:
        report(done)
        while chunk := response.read(CHUNK_BYTES):
            output.write(chunk)
            done += len(chunk)
            report(done)
            if done > MAX_DOWNLOAD_BYTES:
                raise _UnreachableError(f"it sends more than {MAX_DOWNLOAD_BYTES:,} bytes")
    # If a connection is cut, `read` returns nothing, as it does at the end of the file.
    if total is not None and done < total:
        raise _CutError(f"the connection was cut after {done:,} of {total:,} bytes")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---- checksums


def _digest(path: Path, checksum: str) -> str:
    """Return a file's checksum in the form "md5:...", with the algorithm of `checksum`."""
    algorithm, _, _ = checksum.partition(":")
    with path.open("rb") as file:
        # Not for security: it finds damaged files, and the readers trust no file.
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _matches(path: Path, checksum: str) -> bool:
    return _digest(path, checksum) == checksum


def _verify(path: Path, checksum: str) -> None:
    """Raise if a file that is already there is not the published one."""
    actual = _digest(path, checksum)
    if actual != checksum:
        raise MotleyError(
            f"{path} has the wrong checksum: {actual}, not {checksum}. "
            "Delete it, so that it is downloaded again."
        )


# ---- archives


def _unpack(archive: Path, folder: Path, prefix: str, report: Report) -> None:
    """Unpack the regular files below `prefix` into a new folder.

    Links, devices and names that lead out of the folder are errors. Owners and modes are ignored.
    """
    unfinished = folder.with_name(folder.name + ".part")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    if folder.exists():
        raise MotleyError(
            f"{folder} exists and lacks files of this data set. Move it away, so that "
            f"{archive.name} can be unpacked there."
        )
    unpacked_bytes = 0
    try:
        with tarfile.open(archive) as tar:
            for count, member in enumerate(tar):
                path = _path_in(member, prefix, archive)
                if path is None:
                    continue
                unpacked_bytes += member.size
                if count >= MAX_MEMBERS or unpacked_bytes > MAX_UNPACKED_BYTES:
                    raise MotleyError(f"{archive} holds more than any archive of this data set.")
                content = tar.extractfile(member)
                assert content is not None  # only regular files have a path
                target = unfinished / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as output:
                    shutil.copyfileobj(content, output, CHUNK_BYTES)
                report(f"unpacking {archive.name}", unpacked_bytes, None)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise MotleyError(f"{archive} is damaged: {error}.") from None
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if not unfinished.exists():
        raise MotleyError(f"{archive} has no files in {prefix or 'it'}.")
    unfinished.rename(folder)


def _path_in(member: tarfile.TarInfo, prefix: str, archive: Path) -> str | None:
    """Return where a member goes, relative to the new folder, or None if it is left out."""
    if member.isdir():
        return None
    name = posixpath.normpath(member.name)
    if name.startswith(("/", "../")) or name == ".." or "\\" in name or "\0" in name:
        raise MotleyError(f"{archive}: refused to unpack {member.name!r}, a name outside of it.")
    if not member.isreg():
        raise MotleyError(f"{archive}: refused to unpack {member.name!r}, which is no plain file.")
    if not prefix:
        return name
    if not name.startswith(f"{prefix}/"):
        return None
    return name.removeprefix(f"{prefix}/")
