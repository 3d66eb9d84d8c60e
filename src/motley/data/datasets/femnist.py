"""FEMNIST: handwritten characters with the writer of each, in the two forms it is distributed in.

- TensorFlow Federated's HDF5 files: `examples/WRITER/pixels` of shape (N, 28, 28) and
  `examples/WRITER/label` of shape (N). FedImpro uses them: 3,400 writers, 671,585 and 77,483
  images.
- LEAF's JSON files in the folders `train` and `test`: `users` lists the writers, and
  `user_data[WRITER]` has `x`, a list of 784 numbers per image, and `y`, a list of labels.

Both have grey values in [0, 1] and the classes 0 to 9, A to Z, a to z, in this order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout, make_examples
from motley.extras import require
from motley.limits import bounded

if TYPE_CHECKING:
    import h5py

SIDE = 28
CLASSES = 62
LAYOUT = FileLayout(
    "femnist",
    ("fed_emnist_train.h5", "fed_emnist_test.h5"),
    folders=("femnist", "fed_emnist", "FederatedEMNIST/datasets", ""),
)
LEAF_LAYOUT = FileLayout(
    "femnist", ("train", "test"), folders=("femnist", "femnist/data"), holds_folders=True
)
#: LEAF writes 100 writers to a file, which has about 150 MB.
MAX_JSON_BYTES = 1_000_000_000
#: Twice as many images as there are. A compressed HDF5 file can announce any number.
MAX_IMAGES = 1_600_000
#: HDF5 reads whole chunks. A writer has at most a few hundred images.
MAX_CHUNK_BYTES = 100_000_000


class _Writer(NamedTuple):
    """The images of one writer."""

    name: str
    images: np.ndarray
    labels: np.ndarray


@DATASETS.register(
    "femnist",
    "671,585 + 77,483 handwritten characters of 3,400 writers, 28x28 grey, 62 classes; "
    "TensorFlow Federated's HDF5 files or LEAF's JSON files",
    paper="Caldas et al. 2018 (LEAF), arXiv:1812.01097",
)
def load(source: DataSource) -> Dataset:
    """Read the HDF5 files, or else LEAF's folders `train` and `test`."""
    source.refuse_path("femnist")
    if LAYOUT.folder_in(source.root) is None and LEAF_LAYOUT.folder_in(source.root) is not None:
        train_folder, test_folder = LEAF_LAYOUT.find(source.root)
        train = _combine(_read_leaf_folder(train_folder), train_folder)
        test = _combine(_read_leaf_folder(test_folder), test_folder)
    else:
        train_file, test_file = LAYOUT.find(source.root)
        require("h5py", "data set 'femnist'")
        train = _combine(_read_hdf5(train_file), train_file)
        test = _combine(_read_hdf5(test_file), test_file)
    return Dataset("femnist", train, test, classes=CLASSES)


def _combine(writers: Iterator[_Writer], where: Path) -> Examples:
    """Return all images, ordered by the names of their writers, who are numbered in that order."""
    by_name: dict[str, _Writer] = {}
    count = 0
    for writer in writers:
        if writer.name in by_name:
            raise MotleyError(f"{where}: the writer {writer.name!r} occurs twice.")
        by_name[writer.name] = writer
        count += len(writer.labels)
        if count > MAX_IMAGES:
            raise MotleyError(f"{where}: holds more than {MAX_IMAGES:,} images.")
    if not by_name:
        raise MotleyError(f"{where}: there are no writers in it.")
    ordered = [by_name[name] for name in sorted(by_name)]
    images = np.concatenate([writer.images for writer in ordered])
    labels = np.concatenate([writer.labels for writer in ordered])
    numbers = np.repeat(np.arange(len(ordered)), [len(writer.labels) for writer in ordered])
    return make_examples(images, labels, CLASSES, where, numbers)


def _make_writer(name: str, pixels: np.ndarray, labels: np.ndarray, where: str) -> _Writer:
    """Check one writer's arrays, and turn grey values into bytes."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if pixels.shape != (len(labels), SIDE, SIDE) or labels.ndim != 1:
        raise MotleyError(
            f"{where}: pixels must have shape (N, {SIDE}, {SIDE}) and labels (N), "
            f"not {pixels.shape} and {labels.shape}."
        )
    if pixels.dtype.kind not in "fiu" or labels.dtype.kind not in "iu":
        raise MotleyError(
            f"{where}: pixels must be numbers and labels whole numbers, "
            f"not {pixels.dtype} and {labels.dtype}."
        )
    # Written as a negation so that NaN, which compares false, is rejected too.
    if not len(labels) or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise MotleyError(f"{where}: grey values must be in [0, 1], and there must be some.")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise MotleyError(
            f"{where}: labels go from {labels.min()} to {labels.max()}; "
            f"they must be in 0..{CLASSES - 1}."
        )
    images = np.rint(pixels * 255).astype(np.uint8)[..., np.newaxis]
    return _Writer(name, images, labels.astype(np.int64))


# ---- LEAF


def _read_leaf_folder(folder: Path) -> Iterator[_Writer]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise MotleyError(f"{folder}: there are no .json files in it.")
    for file in files:
        yield from read_leaf_file(file)


def read_leaf_file(path: Path) -> Iterator[_Writer]:
    """Yield the writers of one of LEAF's files."""
    content = _parse_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
        raise MotleyError(f"{path} is not a file of LEAF: it has no table 'user_data'.")
    users, user_data = content.get("users"), content["user_data"]
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise MotleyError(f"{path}: 'users' must be a list of names.")
    if sorted(users) != sorted(user_data):
        raise MotleyError(f"{path}: 'users' and 'user_data' name different writers.")
    for user in users:
        where = f"{path}: writer {user!r}"
        samples = user_data[user]
        if not isinstance(samples, dict) or "x" not in samples or "y" not in samples:
            raise MotleyError(f"{where} has no 'x' and 'y'.")
        pixels = _number_array(samples["x"], f"{where}: 'x'")
        labels = _number_array(samples["y"], f"{where}: 'y'")
        if pixels.ndim == 2 and pixels.shape[1] == SIDE * SIDE:
            pixels = pixels.reshape(-1, SIDE, SIDE)
        yield _make_writer(user, pixels, labels, where)


def _parse_json(path: Path) -> Any:
    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise MotleyError(
                f"{path} has {size:,} bytes; a file of LEAF has at most {MAX_JSON_BYTES:,}."
            )
        # Empty lists take 20 times as much memory as text.
        with bounded(f"{path}: its content"):
            text = path.read_text(encoding="utf-8")
            return json.loads(text, parse_constant=refuse_constant)
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None


def _number_array(values: object, where: str) -> np.ndarray:
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        raise MotleyError(f"{where} must be numbers, as many for each image.") from None
    if array.dtype.kind not in "fiu":
        raise MotleyError(f"{where} must be numbers, as many for each image.")
    return array


# ---- HDF5


def _read_hdf5(path: Path) -> Iterator[_Writer]:
    """Yield the writers of one of TensorFlow Federated's files."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            examples = _member(file, "examples", h5py.Group, path)
            for name in examples:
                where = f"{path}: writer {name!r}"
                writer = _member(examples, name, h5py.Group, path)
                pixels = _values(_member(writer, "pixels", h5py.Dataset, path), where)
                labels = _values(_member(writer, "label", h5py.Dataset, path), where)
                yield _make_writer(name, pixels, labels, where)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, UnicodeError) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None


def _member(group: h5py.Group, name: str, wanted: type, path: Path) -> Any:
    """Return a member of a group. Links are refused: they may point to other files."""
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        raise MotleyError(f"{path}: {group.name} has no {name!r}.")
    if not isinstance(link, h5py.HardLink):
        raise MotleyError(f"{path}: {group.name}/{name} is a link, which is not followed.")
    member = group[name]
    if not isinstance(member, wanted):
        raise MotleyError(
            f"{path}: {group.name}/{name} must be a {wanted.__name__.lower()} of HDF5."
        )
    return member


def _values(dataset: h5py.Dataset, where: str) -> np.ndarray:
    """Return the values after checking that they are in this file, and how many they are."""
    if dataset.is_virtual or dataset.external:
        raise MotleyError(f"{where}: its values are in another file, which is not read.")
    if dataset.dtype.kind not in "fiu" or dataset.shape is None:
        raise MotleyError(f"{where}: its values must be numbers, not {dataset.dtype}.")
    if dataset.size > MAX_IMAGES:
        # A writer has at most a few hundred images of 784 values.
        raise MotleyError(f"{where}: {dataset.size:,} values are more than any writer has.")
    if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > MAX_CHUNK_BYTES:
        raise MotleyError(f"{where}: its chunks are larger than any writer's values.")
    return np.asarray(dataset[()])
