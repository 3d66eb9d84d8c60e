"""The user's own images: one .npz file with x_train, y_train, x_test and y_test.

Arrays of other kinds are read by data.name = "files", which also holds out a test part.

A node does not evaluate: only x_train and y_train are read from its file, and the other two may be
missing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.arrays import check_class_numbers, class_targets
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples
from motley.data.files.archive import DAMAGED, check_archive

TRAINING_KEYS = ("x_train", "y_train")
KEYS = (*TRAINING_KEYS, "x_test", "y_test")
REMEDY = "Save four arrays with np.savez: x_train, y_train, x_test and y_test."
OTHER_KINDS = 'Arrays that are not images are read with data.name = "files".'
_NPY_MAGIC = b"\x93NUMPY"


@DATASETS.register("npz", "your own arrays: a .npz file with x_train, y_train, x_test, y_test")
def load(source: DataSource) -> Dataset:
    """Read the user's file. The number of classes is taken to be the largest label plus one."""
    if source.path is None:
        raise MotleyError(
            f"data set 'npz' needs a path to a .npz file that holds {', '.join(KEYS)}."
        )
    arrays = read_arrays(source.path.expanduser(), KEYS if source.tested else TRAINING_KEYS)
    train = _examples(arrays, "train", source.path)
    if source.tested:
        test = _examples(arrays, "test", source.path)
    else:
        test = Examples(train.inputs[:0], train.targets[:0])
    # `initial` because the test part may be empty.
    classes = 1 + max(int(part.targets.max(initial=0)) for part in (train, test))
    count = len(train) + len(test)
    check_class_numbers(classes, count, str(source.path), tested=source.tested)
    return Dataset("npz", train, test, classes, classes_inferred=True, tested=source.tested)


def _examples(arrays: Mapping[str, np.ndarray], part: str, path: Path) -> Examples:
    images = as_images(arrays[f"x_{part}"], f"{path}: x_{part}")
    return Examples(images, as_labels(arrays[f"y_{part}"], f"{path}: y_{part}"))


def read_arrays(
    path: Path, keys: Sequence[str] = KEYS, optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the arrays named `keys`, and those named `optional` that are there.

    Declared sizes are checked first. Arrays of Python objects are rejected, being pickles.
    """
    _check_is_file(path)
    try:
        _check_is_npz(path)
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive]
            if missing:
                present = ", ".join(archive.files) or "nothing"
                raise MotleyError(
                    f"{path} lacks {', '.join(missing)}. It holds: {present}. {REMEDY}"
                )
            wanted = [*keys, *(key for key in optional if key in archive)]
            return {key: _read_array(archive, key, path) for key in wanted}
    except DAMAGED as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}") from error


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise MotleyError(f"{path} is a folder; data set 'npz' reads one file. {REMEDY}")
    if not path.exists():
        raise MotleyError(f"there is no file {path}.")
    if not path.is_file():
        raise MotleyError(f"{path} is not a regular file.")


def _check_is_npz(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_NPY_MAGIC))
    if start == _NPY_MAGIC:
        raise MotleyError(f"{path} holds a single array. {REMEDY}")
    if not zipfile.is_zipfile(path):
        raise MotleyError(
            f"{path} is not a .npz file, or is truncated: it starts with {start!r}. {REMEDY}"
        )


def _read_array(archive: np.lib.npyio.NpzFile, key: str, path: Path) -> np.ndarray:
    """Return one array. NumPy's own message about a pickled array does not say which one it is."""
    try:
        array = archive[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        is_images = key.startswith("x")
        advice = "All images must have one size" if is_images else "Labels must be whole numbers"
        raise MotleyError(
            f"{path}: {key} is an array of Python objects, which is not read because it is a "
            f"pickle. {advice}, so that NumPy makes one plain array of them."
        ) from None
    if not isinstance(array, np.ndarray):
        raise MotleyError(f"{path}: {key} is not an array saved by NumPy.")
    return array


def as_images(array: np.ndarray, where: str) -> np.ndarray:
    """Return uint8 images with channels last.

    Accepted shapes are (N, H, W), (N, H, W, C) and (N, C, H, W); the last is recognised by a second
    dimension of 1 or 3 when the fourth is neither. Values are uint8, or floats in [0, 1], which are
    scaled to 0..255. Other floats are rejected: a wrong guess at their range would silently train
    on wrong images.
    """
    if array.ndim not in (3, 4):
        raise MotleyError(
            f"{where} must be (N, H, W), (N, H, W, C) or (N, C, H, W), not {array.shape}. "
            f"{OTHER_KINDS}"
        )
    if array.ndim == 3:
        array = array[..., np.newaxis]
    elif array.shape[1] in (1, 3) and array.shape[3] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(_as_bytes(array, where))


def _as_bytes(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise MotleyError(f"{where} must be uint8, or floats in [0, 1], not {array.dtype}.")
    # Written as a negation so that NaN, which compares false, is rejected too.
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise MotleyError(
            f"{where} has floats from {array.min():g} to {array.max():g}; "
            f"floats must be in [0, 1]. Save other values as uint8. {OTHER_KINDS}"
        )
    return np.rint(array * 255).astype(np.uint8)


def as_labels(array: np.ndarray, where: str) -> np.ndarray:
    """Return whole-number labels of shape (N,) as int64."""
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise MotleyError(
            f"{where} must be whole numbers of shape (N,), "
            f"not {array.dtype} of shape {array.shape}."
        )
    return class_targets(array, lambda row: f"{where}, row {row}")
