"""The in-memory data set type, where its files are looked for, and loading by name.

A data set is two arrays of inputs and two arrays of targets, all of them in memory, so that they
can be copied to a device once and indexed there. Each file format has its own reader in
`motley.data.datasets`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from motley.core.dotted import describe, parameter_names, path_of, required_parameters
from motley.core.errors import MotleyError
from motley.core.registry import Registry
from motley.data.files.settings import FileSettings
from motley.files import given_path
from motley.models.inputs import ImageShape, InputShape, TokenShape, describe_shape, dims_of


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs and their targets, one row per example.

    | inputs | array | `input_shape` |
    |---|---|---|
    | images | uint8, or float32 in 0 to 1 (N, height, width, channels) | None, or `ImageShape` |
    | signals | float32 (N, channels, length) | `SignalShape` |
    | tokens | any integers (N, length) | `TokenShape` |
    | table | float32 (N, columns): numbers, then category numbers | `TableShape` |
    | others | float32 (N, ...) | `ArrayShape` |

    Targets are int64 for classes (N,) and tokens (N,) or (N, length), and float32 for a regression.
    """

    inputs: np.ndarray
    targets: np.ndarray
    #: The natural client of each example (int64; N), numbered from 0, if the data set records it:
    #: a person, a hospital, a writer. The partition "natural" makes one client of each.
    clients: np.ndarray | None = None
    #: The kind and shape of one input. None: images, with the shape of the array.
    input_shape: InputShape | None = None

    def __post_init__(self) -> None:
        for field_name in ("inputs", "targets", "clients"):
            array: object = getattr(self, field_name)
            if not isinstance(array, np.ndarray) and (array is not None or field_name != "clients"):
                raise MotleyError(
                    f"Examples: {field_name}: is {describe(array)}; a NumPy array is expected. "
                    "motley.data.from_datasets takes tensors and lists."
                )
        if self.input_shape is None or isinstance(self.input_shape, ImageShape):
            self._check_images()
        else:
            self._check_inputs(self.input_shape)
        if self.targets.dtype not in (np.int64, np.float32) or self.targets.ndim == 0:
            raise MotleyError(
                "targets must be int64 (classes, tokens) or float32 (regression), one row per "
                f"example, not {self.targets.dtype} of shape {self.targets.shape}."
            )
        if len(self.inputs) != len(self.targets):
            raise MotleyError(
                f"there are {len(self.inputs)} inputs but {len(self.targets)} targets."
            )
        clients = self.clients
        if clients is not None and (
            clients.dtype != np.int64 or clients.shape != self.targets.shape[:1]
        ):
            raise MotleyError(
                f"clients must be int64 of shape {self.targets.shape[:1]}, "
                f"not {clients.dtype} of shape {clients.shape}."
            )

    def __repr__(self) -> str:
        """Describe the examples, for notebooks; the arrays may have millions of numbers."""
        clients = "" if self.clients is None else f", {len(np.unique(self.clients))} clients"
        return f"Examples({len(self)}: {describe_shape(self.shape)}{clients})"

    def _check_images(self) -> None:
        if self.inputs.dtype not in (np.uint8, np.float32) or self.inputs.ndim != 4:
            raise MotleyError(
                "images must be uint8 or float32 of shape (N, height, width, channels), "
                f"not {self.inputs.dtype} of shape {self.inputs.shape}."
            )
        height, width, channels = self.inputs.shape[1:]
        if self.input_shape not in (None, (channels, height, width)):
            raise MotleyError(
                f"images of shape {self.inputs.shape[1:]} do not have {self.input_shape}."
            )

    def _check_inputs(self, shape: InputShape) -> None:
        integers = isinstance(shape, TokenShape)
        right_type = (
            np.issubdtype(self.inputs.dtype, np.integer)
            if integers
            else self.inputs.dtype == np.float32
        )
        if not right_type or self.inputs.shape[1:] != dims_of(shape):
            expected = "integers" if integers else "float32"
            raise MotleyError(
                f"inputs for {shape} must be {expected} of shape (N, "
                f"{', '.join(map(str, dims_of(shape)))}), "
                f"not {self.inputs.dtype} of shape {self.inputs.shape}."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, rows: np.ndarray | slice) -> Examples:
        """Return some of the examples."""
        clients = None if self.clients is None else self.clients[rows]
        return Examples(self.inputs[rows], self.targets[rows], clients, self.input_shape)

    @property
    def any_range(self) -> bool:
        """Whether these are images of floats beyond 0 to 1. No byte stands for such a number."""
        if not isinstance(self.shape, ImageShape) or self.inputs.dtype != np.float32:
            return False
        return bool(self.inputs.min(initial=0) < 0 or self.inputs.max(initial=1) > 1)

    @property
    def shape(self) -> InputShape:
        """The kind and shape of one input."""
        if self.input_shape is not None:
            return self.input_shape
        height, width, channels = self.inputs.shape[1:]
        return ImageShape(channels, height, width)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples of one shape.

    `classes` is the number of a model's outputs: classes (labels are 0 to classes - 1), tokens of
    the vocabulary, or numbers that a regression predicts.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    #: The number of classes was not declared anywhere; it is the largest label plus one.
    classes_inferred: bool = False
    #: False if nothing is evaluated on this data set, as on a node. `test` may then be empty.
    tested: bool = True
    #: The name of a task (`motley.tasks`).
    task: str = "classification"
    #: The names of the classes, if they have any.
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            examples: object = getattr(self, part)
            if not isinstance(examples, Examples):
                raise MotleyError(
                    f"data set {self.name!r}: {part}: is {describe(examples)}; "
                    "motley.data.Examples are expected."
                )
        is_whole = isinstance(self.classes, Integral) and not isinstance(self.classes, bool)
        if not is_whole or self.classes < 1:
            raise MotleyError(
                f"data set {self.name!r}: classes = {self.classes!r}: should be the number of a "
                "model's outputs, 1 or more."
            )
        self._check_targets("train", self.train)
        if self.tested or len(self.test):
            self._check_targets("test", self.test)
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise MotleyError(
                f"data set {self.name!r}: train inputs are {self.train.inputs.shape[1:]} "
                f"but test inputs are {self.test.inputs.shape[1:]}."
            )
        same_type = self.train.inputs.dtype == self.test.inputs.dtype
        if isinstance(self.shape, ImageShape) and len(self.test) and not same_type:
            # Bytes are divided by 255 and floats are not, so the same pixels would differ.
            raise MotleyError(
                f"data set {self.name!r}: train images are of the type {self.train.inputs.dtype} "
                f"but test images {self.test.inputs.dtype}. Convert them to the same type."
            )
        self._check_finite("train", self.train.inputs)
        self._check_finite("test", self.test.inputs)

    def _check_finite(self, part: str, inputs: np.ndarray) -> None:
        """Reject NaN and infinity, with which every update would be rejected later."""
        # The sum is finite if and only if all values are, and needs no array of the same size.
        if np.issubdtype(inputs.dtype, np.integer) or np.isfinite(inputs.sum(dtype=np.float64)):
            return
        row = int(np.flatnonzero(~np.isfinite(inputs.reshape(len(inputs), -1)).all(1))[0])
        raise MotleyError(
            f"data set {self.name!r}: input {row} of the {part} part holds a number that is not "
            "finite."
        )

    def __repr__(self) -> str:
        """Describe the data set, for notebooks."""
        outputs = f"{self.classes} {'outputs' if self.task == 'regression' else 'classes'}"
        parts = f"train={self.train!r}, test={self.test!r}"
        return f"Dataset({self.name!r}, {self.task}, {outputs}, {parts})"

    def _check_targets(self, part: str, examples: Examples) -> None:
        if not len(examples):
            raise MotleyError(f"data set {self.name!r}: the {part} part is empty.")
        targets = examples.targets
        is_class_number = targets.dtype == np.int64 and targets.ndim == 1
        if self.task == "classification" and not is_class_number:
            raise MotleyError(
                f"data set {self.name!r}: {part} labels must be int64 of shape (N,), "
                f"not {targets.dtype} of shape {targets.shape}."
            )
        if targets.dtype == np.float32:
            if not np.isfinite(targets).all():
                row = int(np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))[0])
                raise MotleyError(
                    f"data set {self.name!r}: target {row} of the {part} part is not finite."
                )
            return
        lowest, highest = int(targets.min()), int(targets.max())
        if lowest < 0 or highest >= self.classes:
            raise MotleyError(
                f"data set {self.name!r}: {part} labels go from {lowest} to {highest}; "
                f"with {self.classes} classes they must be in 0..{self.classes - 1}."
            )

    def check_inferred_classes(self) -> None:
        """Reject labels that do not look like class numbers, if the class count was inferred.

        Labels 1 to 10 would silently give a model with 11 classes, and one stray label of a million
        a model with a million classes. A node's own data is not checked this way: the federation
        fixes the number of classes, and a node may hold examples of only a few of them.
        """
        if not self.classes_inferred:
            return
        labels = np.unique(np.concatenate([self.train.targets, self.test.targets]))
        label_range = f"data set {self.name!r}: labels {labels[0]}..{labels[-1]}"
        if labels[0] > 0:
            raise MotleyError(
                f"{label_range}: class 0 has no example. Classes are numbered from 0; "
                f"subtract {labels[0]} from all labels."
            )
        missing = self.classes - len(labels)
        if missing > len(labels):
            raise MotleyError(
                f"{label_range} make {self.classes:,} classes, and {missing:,} of them have no "
                "example. Number the classes 0, 1, 2, ... without gaps."
            )

    @property
    def shape(self) -> InputShape:
        """The kind and shape of one input."""
        return self.train.shape


@dataclass(frozen=True)
class DataSource:
    """The places a reader may look in."""

    #: Folder with the named data sets.
    root: Path
    #: The user's own file.
    path: Path | None = None
    #: False if the test part is not needed; the reader may then leave it out.
    tested: bool = True
    #: How the user's own file is read.
    files: FileSettings = field(default_factory=FileSettings)
    #: Readers that can save memory by it return at most this many examples of each natural client
    #: in each part, at equal distances. 0: no limit.
    max_per_client: int = 0

    def refuse_path(self, name: str) -> None:
        """Reject a user's file given to a data set that would not read it."""
        if self.path is not None:
            raise MotleyError(
                f"data set {name!r} takes no path, but {self.path} was given. Did you mean 'files'?"
            )


Reader: TypeAlias = Callable[[DataSource], Dataset]


def own_reader(item: Any) -> Reader:
    """Return the reader of a user's own data set: a `Dataset`, or a function that returns one.

    The function may have parameters named `root`, `path` and `tested`, as in `DataSource`, or
    `source`, the whole of it.
    """
    if isinstance(item, Dataset):
        return lambda source: item
    if not callable(item) or isinstance(item, type):
        raise MotleyError(
            f"is {describe(item)}; a function that returns a motley.data.Dataset is expected."
        )
    names = parameter_names(item)

    def read(source: DataSource) -> Dataset:
        offered = {
            "source": source,
            "root": source.root,
            "path": source.path,
            "tested": source.tested,
        }
        arguments = {name: value for name, value in offered.items() if name in names}
        dataset = item(**arguments)
        if not isinstance(dataset, Dataset):
            raise MotleyError(
                f"data set {path_of(item) or item!r}: returned {describe(dataset)}; "
                "a motley.data.Dataset is expected."
            )
        return dataset

    unknown_names = [name for name in required_parameters(item) if name not in OFFERED]
    if unknown_names:
        raise MotleyError(
            f"has a parameter {unknown_names[0]!r} without a default. A data set's function may "
            f"ask for {', '.join(OFFERED)}."
        )
    return read


#: The arguments that a user's own reader may ask for by name.
OFFERED = ("source", "root", "path", "tested")

DATASETS: Registry[Reader] = Registry("data set", group="motley.datasets", accept=own_reader)


def data_root() -> Path:
    """Return the folder with the named data sets: $MOTLEY_DATA, or `motley` in the user's cache."""
    if root := os.environ.get("MOTLEY_DATA"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motley"


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    path: str | Path | None = None,
    tested: bool = True,
    files: FileSettings | None = None,
    max_per_client: int = 0,
) -> Dataset:
    """Load a registered data set from `root` (default: `data_root()`) or the user's own `path`.

    `files` says how the data set "files" reads that path.

    With `tested=False` the file need not contain a test part, and readers that can save memory by
    skipping it return an empty one. The same readers heed `max_per_client`; `DataSettings.load`
    applies it to any data set.
    """
    root = data_root() if root is None else given_path(root, "load_dataset: root")
    path = None if path is None else given_path(path, "load_dataset: path")
    files = files or FileSettings()
    return DATASETS[name](DataSource(root, path, tested, files, max_per_client))


@dataclass(frozen=True)
class FileLayout:
    """The files of a named data set, and the folders below the data root that may hold them."""

    name: str
    #: Paths below one of the `folders`.
    files: tuple[str, ...]
    #: Relative to the data root, in the order in which they are searched.
    folders: tuple[str, ...]
    #: Each file may have any of these endings; earlier ones are preferred.
    endings: tuple[str, ...] = ("",)
    #: A folder must exist for each of `files`, which are not files but folders.
    holds_folders: bool = False

    def find(self, root: Path) -> list[Path]:
        """Return the files from the first folder that contains all of them, or raise."""
        searched = []
        for name in self.folders:
            folder = root / name
            paths, missing = self._search(folder)
            if not missing:
                return paths
            # Missing files are listed only for folders that have some; it is obvious for the rest.
            searched.append(f"  {folder}" + (f" (lacks {', '.join(missing)})" if paths else ""))
        things = "folders" if self.holds_folders else "files"
        alternatives = "".join(f" (or {ending})" for ending in self.endings if ending)
        raise MotleyError(
            f"data set {self.name!r} was not found.\n"
            f"Wanted {things}{alternatives}: {', '.join(self.files)}\n"
            "Looked in:\n" + "\n".join(searched) + "\n"
            f"Download them with `motley data fetch {self.name}`, or put the {things} there, or "
            "set MOTLEY_DATA to the folder that holds them: "
            f"export MOTLEY_DATA=/your/data (this time it was {root})."
        )

    def folder_in(self, root: Path) -> Path | None:
        """Return the folder that contains all files, if there is one."""
        for name in self.folders:
            _, missing = self._search(root / name)
            if not missing:
                return root / name
        return None

    def _search(self, folder: Path) -> tuple[list[Path], list[str]]:
        """Return the paths of the files in `folder`, and the names of those that are not there."""
        paths, missing = [], []
        for file in self.files:
            path = self._with_any_ending(folder, file)
            if path is None:
                missing.append(file)
            else:
                paths.append(path)
        return paths, missing

    def _with_any_ending(self, folder: Path, file: str) -> Path | None:
        for ending in self.endings:
            path = folder / (file + ending)
            if path.is_dir() if self.holds_folders else path.is_file():
                return path
        return None


def make_examples(
    images: np.ndarray,
    labels: np.ndarray,
    classes: int,
    where: object,
    clients: np.ndarray | None = None,
) -> Examples:
    """Return examples after checking counts and labels. Errors start with `where`, the file."""
    if len(images) != len(labels):
        raise MotleyError(f"{where}: there are {len(images)} images but {len(labels)} labels.")
    if not len(labels):
        raise MotleyError(f"{where}: there are no images in it.")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        raise MotleyError(
            f"{where}: labels go from {lowest} to {highest}; they must be in 0..{classes - 1}."
        )
    return Examples(images, labels.astype(np.int64), clients)
