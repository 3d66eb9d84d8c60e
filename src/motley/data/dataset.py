"""What a data set is, where its files are looked for, and how one is loaded by name.

A data set is two arrays of bytes and two of labels, whole and in memory: that is what can be copied to a device once
and indexed there. Readers of single formats live in `motley.data.datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.core.registry import Registry
from motley.models import ImageShape


@dataclass(frozen=True, eq=False)
class Examples:
    """Images (uint8; N, height, width, channels) and their labels (int64; N)."""

    images: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise MotleyError(
                "images must be uint8 of shape (N, height, width, channels), "
                f"not {self.images.dtype} of shape {self.images.shape}."
            )
        if self.labels.dtype != np.int64 or self.labels.ndim != 1:
            raise MotleyError(
                f"labels must be int64 of shape (N,), not {self.labels.dtype} of shape {self.labels.shape}."
            )
        if len(self.images) != len(self.labels):
            raise MotleyError(f"there are {len(self.images)} images but {len(self.labels)} labels.")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images to train on and images to test on, of one shape, labelled 0 to classes - 1."""

    name: str
    train: Examples
    test: Examples
    classes: int
    classes_inferred: bool = False
    """Whether the number of classes is the largest label plus one, for want of a better source."""
    tested: bool = True
    """False: nothing is evaluated with this data set, and its test part may be empty. So it is at a node."""

    def __post_init__(self) -> None:
        for part, examples in (("train", self.train), ("test", self.test)):
            if part == "test" and not self.tested and not len(examples):
                continue
            if not len(examples):
                raise MotleyError(f"data set {self.name!r}: the {part} part is empty.")
            low, high = int(examples.labels.min()), int(examples.labels.max())
            if low < 0 or high >= self.classes:
                raise MotleyError(
                    f"data set {self.name!r}: {part} labels go from {low} to {high}; "
                    f"with {self.classes} classes they must lie in 0..{self.classes - 1}."
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise MotleyError(
                f"data set {self.name!r}: train images are {self.train.images.shape[1:]} "
                f"but test images are {self.test.images.shape[1:]}."
            )

    def check_inferred_classes(self) -> None:
        """Refuse labels that do not look like class numbers, if the number of classes was inferred from them.

        Labels 1 to 10 would make a model of 11 classes, and a stray label of a million one of a million classes. The
        part of a federation's data that a node holds is not checked: its classes are the federation's, and it may have
        examples of a few of them only.
        """
        if not self.classes_inferred:
            return
        labels = np.unique(np.concatenate([self.train.labels, self.test.labels]))
        span = f"data set {self.name!r}: labels {labels[0]}..{labels[-1]}"
        if labels[0] > 0:
            raise MotleyError(
                f"{span}: class 0 has no example. Classes are numbered from 0; subtract {labels[0]} from all labels."
            )
        missing = self.classes - len(labels)
        if missing > len(labels):
            raise MotleyError(
                f"{span} make {self.classes:,} classes, and {missing:,} of them have no example. "
                "Number the classes 0, 1, 2, ... without gaps."
            )

    @property
    def shape(self) -> ImageShape:
        """What a model for this data set is fed."""
        height, width, channels = self.train.images.shape[1:]
        return ImageShape(channels, height, width)


@dataclass(frozen=True)
class DataSource:
    """Where a reader may look: `root` is where named data sets lie, `path` is the user's own file."""

    root: Path
    path: Path | None = None
    tested: bool = True
    """False: the test part is not needed, and a reader may leave it out."""

    def refuse_path(self, name: str) -> None:
        """Say so when a file was given to a data set that would not read it."""
        if self.path is not None:
            raise MotleyError(f"data set {name!r} takes no path, but {self.path} was given. Did you mean 'npz'?")


DATASETS: Registry[Callable[[DataSource], Dataset]] = Registry("data set")


def data_root() -> Path:
    """Return the folder of named data sets: MOTLEY_DATA, else `motley` in the user's cache folder."""
    if given := os.environ.get("MOTLEY_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motley"


def load_dataset(name: str, *, root: Path | None = None, path: Path | None = None, tested: bool = True) -> Dataset:
    """Load a registered data set from `root` (default: `data_root()`), or from the user's own `path`.

    If it is not `tested`, its test part may be missing, and is left empty where that saves memory.
    """
    return DATASETS[name](DataSource(data_root() if root is None else root, path, tested))


def find_files(
    name: str, source: DataSource, folders: Sequence[Path], wanted: Sequence[str], endings: Sequence[str] = ("",)
) -> list[Path]:
    """Return the wanted files of the first folder that holds them all, each under any one of the endings."""
    looked = []
    for folder in folders:
        found = {file: _present(folder, file, endings) for file in wanted}
        paths = [path for path in found.values() if path]
        if len(paths) == len(wanted):
            return paths
        lacks = [file for file, path in found.items() if not path]
        looked.append(f"  {folder}" + (f" (lacks {', '.join(lacks)})" if paths else ""))
    also = "".join(f" (or {ending})" for ending in endings if ending)
    raise MotleyError(
        f"data set {name!r} was not found.\nWanted files{also}: {', '.join(wanted)}\n"
        "Looked in:\n" + "\n".join(looked) + "\n"
        f"Put the files there, or set MOTLEY_DATA to the folder that holds them: export MOTLEY_DATA=/your/data "
        f"(this time it was {source.root})."
    )


def _present(folder: Path, file: str, endings: Sequence[str]) -> Path | None:
    return next((path for ending in endings if (path := folder / (file + ending)).is_file()), None)
