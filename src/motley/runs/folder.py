"""The folder of a run.

config.toml          the resolved configuration, with every default written out
environment.json     versions and hardware that the run started on
plugins.json         where users' own modules were imported from, if the run uses any
metrics.jsonl        one line per round
client_scores.jsonl  the score of every client, one line per round that scored clients
privacy-ledger.jsonl every request to clients, if the run has [privacy]
changes.jsonl        settings that were changed when the run was resumed, if any were
checkpoints/         round-000010/ and so on, each complete or absent
clients/             the clients' state between rounds, if the method has one
tensorboard/         event files, if tensorboard is installed
timeline.png         which client trained in which slot and when, after `motley run --profile`
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

import torch

from motley.config import Config, for_display, missing_plugins, read_resolved, read_toml
from motley.core.errors import MotleyError
from motley.files import check_new_folder, write_atomically
from motley.runs.plugins import require_importable, write_plugins
from motley.version import __version__

try:
    import fcntl
except ImportError:  # Windows, where nothing stops two processes from writing the same run
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """The paths inside a run's folder, and a lock that only one process can hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.client_scores = path / "client_scores.jsonl"
        self.privacy_ledger = path / "privacy-ledger.jsonl"
        self.changes = path / "changes.jsonl"
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
        self.tensorboard = path / "tensorboard"
        self.timeline = path / "timeline.png"
        self.lock = path / ".lock"

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Create the folder of a new run. A folder that is not empty is rejected and left alone."""
        folder = cls(path)
        folder.require_free()
        require_importable(config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock.touch(exist_ok=False)
        except FileExistsError:
            # Of two runs that are started in the same folder at once, one creates the lock file.
            raise folder._not_free() from None
        except OSError as error:
            raise MotleyError(f"{path} cannot be created: {error}.") from None
        try:
            write_atomically(folder.config, config.to_toml().encode())
            environment = json.dumps(describe_environment(), indent=2)
            write_atomically(folder.environment, environment.encode())
            write_plugins(path, config)
        except BaseException:
            # Leave nothing behind, for example on a full disk: the same command must work later.
            shutil.rmtree(path, ignore_errors=True)
            raise
        return folder

    def require_free(self) -> None:
        """Raise if a new run cannot be created here: the path is taken or is not writable."""
        try:
            is_free = not self.path.exists() or (
                self.path.is_dir() and not any(self.path.iterdir())
            )
        except OSError as error:
            raise MotleyError(f"{self.path} cannot be created: {error}.") from None
        if not is_free:
            raise self._not_free()
        check_new_folder(self.path)

    def _not_free(self) -> MotleyError:
        reason = "is not empty" if self.path.is_dir() else "is a file"
        advice = f" To continue it: motley resume {self.path}" if self.config.exists() else ""
        return MotleyError(
            f"{self.path} already exists and {reason}; a run needs a folder of its own.{advice}"
        )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run."""
        folder = cls(path)
        if not folder.config.exists():
            raise MotleyError(f"{path} is not a run: there is no {folder.config.name} in it.")
        return folder

    def read_config(self) -> Config:
        """Return the run's resolved configuration."""
        return read_resolved(self.config)

    def read_config_for_display(self) -> tuple[Config, str]:
        """Return the run's configuration, also if users' own modules in it are not here.

        The second value is a sentence about the first module that is missing; empty: none is. Only
        numbers can be shown then: nothing of the run can be built.
        """
        try:
            return self.read_config(), ""
        except MotleyError as error:
            values = read_toml(self.config)
            if not missing_plugins(values):
                raise
            reason = str(error).splitlines()[0]
            return for_display(values), f"Shown without the run's own code: {reason}"

    def write_config(self, config: Config) -> None:
        """Replace the run's configuration."""
        write_atomically(self.config, config.to_toml().encode())

    def is_locked(self) -> bool:
        """Return whether a process is writing the run at this moment."""
        if fcntl is None or not self.lock.exists():
            return False
        try:
            lock = self.lock.open()
        except OSError:  # it is not the file that `locked` makes
            return False
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for this process. The operating system releases it if the process dies."""
        try:
            lock = self.lock.open("w")
        except OSError as error:
            raise MotleyError(f"{self.lock}: cannot be written: {error.strerror}.") from None
        with lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise MotleyError(f"{self.path} is being written by another process.") from None
            _close_in_forks()
            _locks.add(lock)
            try:
                yield
            finally:
                _locks.discard(lock)


#: The locks that this process holds.
_locks: set[IO[str]] = set()


@cache
def _close_in_forks() -> None:
    """Have processes that are forked from this one close its locks, from now on.

    A fork shares a lock. If this process is killed, its workers may live for some milliseconds
    more, and the run would still be locked for whoever resumes it at once.
    """

    def close_locks() -> None:
        for lock in _locks:
            lock.close()
        _locks.clear()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=close_locks)


def as_file_name(text: str) -> str:
    """Return a name of a method or data set as part of a file's name: mine.Pull for mine:Pull."""
    return re.sub(r"[^\w.+-]", ".", text)


def next_free(parent: Path, stem: str) -> Path:
    """Return parent/stem-N with the lowest N that does not exist yet."""
    stem = as_file_name(stem)
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def _commit() -> str:
    """Return the commit of the working folder, if it belongs to a git repository; else ""."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def describe_environment() -> dict[str, str | int]:
    """Return the versions and the hardware, to be saved with a run's results."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "motley": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
