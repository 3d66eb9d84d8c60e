"""The folder of a run.

config.toml          the resolved configuration: every default written out
environment.json     versions and hardware the run began on
metrics.jsonl        a line a round
checkpoints/         round-000010/ and so on, each complete or absent
clients/             what clients remember between rounds, where the method keeps something
tensorboard/         event files, where tensorboard is installed
timeline.png         who trained in which slot and when, after `motley run --profile`
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import motley
from motley.config import Config, read_resolved
from motley.errors import MotleyError
from motley.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows: two processes on one run are then not told apart
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """Where a run is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.clients = path / "clients"
        self.tensorboard = path / "tensorboard"
        self.timeline = path / "timeline.png"
        self.lock = path / ".lock"

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Make a new run's folder; one that already holds something is refused, and nothing in it is touched."""
        folder = cls(path)
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
            if not taken:
                path.mkdir(parents=True, exist_ok=True)
                folder.lock.touch(exist_ok=False)
        except FileExistsError:
            taken = True  # of two runs that want the folder at the same moment, one makes the lock file
        except OSError as error:
            raise MotleyError(f"{path} cannot be made: {error}.") from None
        if taken:
            known = f" To go on with it: motley resume {path}" if folder.config.exists() else ""
            raise MotleyError(f"{path} already exists and is not empty; a run needs a folder of its own.{known}")
        write_atomically(folder.config, config.to_toml().encode())
        write_atomically(folder.environment, json.dumps(describe_environment(), indent=2).encode())
        return folder

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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; the lock ends with the process, however it ends."""
        with self.lock.open("w") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise MotleyError(f"{self.path} is being written by another process.") from None
            yield


def next_free(parent: Path, stem: str) -> Path:
    """Return parent/stem-N with the lowest N that is not taken."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def describe_environment() -> dict[str, str | int]:
    """Return the versions and the hardware that a run's numbers belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "motley": motley.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }
