"""Files of a deployment that only their owner may read.

They hold keys, the clients' updates and states, and paths of private data. New files are private
because the commands, and all processes that they start, run under `private_files`; the permissions
of other files are corrected when a server or a node starts.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Access for the group and for others.
OTHERS = 0o077


@contextmanager
def private_files() -> Iterator[None]:
    """Create files with mode 0600 and folders with 0700 in the block, whatever the umask was."""
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def files_in(folder: Path) -> Iterator[Path]:
    """Yield a folder and everything in it. Links are not followed."""
    yield folder
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(place) / name


def restrict_access(paths: Iterable[Path], name: Path) -> None:
    """Remove the access of other users, and print it. `name` is the deployment or the node."""
    restricted, failed = [], []
    for path in paths:
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) or not status.st_mode & OTHERS:
                continue
            if status.st_mode & stat.S_ISVTX:
                failed.append(path)  # a shared folder such as /tmp, which belongs to the system
                continue
            path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS)
            restricted.append(path)
        except FileNotFoundError:
            continue
        except OSError:
            failed.append(path)
    if restricted:
        report(
            f"{name}: other users had access to {len(restricted)} files and folders, "
            f"for example {restricted[0]}. Now only their owner has."
        )
    if failed:
        report(
            f"{name}: other users have access to {len(failed)} files and folders, for example "
            f"{failed[0]}, and this cannot be changed here. They may contain keys and clients' "
            "tensors: chmod -R go-rwx takes the access away."
        )


def report(text: str) -> None:
    """Print a warning."""
    print(f"motley: {text}", file=sys.stderr, flush=True)
