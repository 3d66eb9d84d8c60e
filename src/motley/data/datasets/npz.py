"""The user's own images: one .npz file with x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from motley.data.dataset import DATASETS, Dataset, DataSource, Examples
from motley.errors import MotleyError

KEYS = ("x_train", "y_train", "x_test", "y_test")


@DATASETS.register("npz", "your own arrays: a .npz file with x_train, y_train, x_test, y_test")
def load(source: DataSource) -> Dataset:
    """Read the user's file; there are as many classes as the largest label of either part says."""
    if source.path is None:
        raise MotleyError(f"data set 'npz' needs a path to a .npz file that holds {', '.join(KEYS)}.")
    arrays = read_arrays(source.path.expanduser())
    train, test = (
        Examples(
            as_images(arrays[f"x_{part}"], f"{source.path}: x_{part}"),
            as_labels(arrays[f"y_{part}"], f"{source.path}: y_{part}"),
        )
        for part in ("train", "test")
    )
    classes = 1 + max(int(part.labels.max(initial=0)) for part in (train, test))
    return Dataset("npz", train, test, classes)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the four arrays. Arrays of Python objects are pickles and are refused."""
    if not path.is_file():
        raise MotleyError(f"there is no file {path}.")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise MotleyError(f"{path} holds a single array; save the four with np.savez: {', '.join(KEYS)}.")
        with archive:
            if missing := [key for key in KEYS if key not in archive]:
                raise MotleyError(
                    f"{path} lacks {', '.join(missing)}. It holds: {', '.join(archive.files) or 'nothing'}."
                )
            return {key: archive[key] for key in KEYS}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise MotleyError(f"{path} is no .npz file of plain arrays: {error}") from error


def as_images(array: np.ndarray, where: str) -> np.ndarray:
    """Return uint8 images with channels last.

    Taken are (N, H, W), (N, H, W, C) and (N, C, H, W). The last is told by its second dimension being 1 or 3 and its
    fourth being neither. Values are uint8, or floats in [0, 1], which become 0..255; other floats are refused, because
    a guess at their range would train on wrong images in silence.
    """
    if array.ndim not in (3, 4):
        raise MotleyError(f"{where} must be (N, H, W), (N, H, W, C) or (N, C, H, W), not {array.shape}.")
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
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # also true of NaN
        raise MotleyError(
            f"{where} has floats from {array.min():g} to {array.max():g}; floats must lie in [0, 1]. "
            "Save other values as uint8."
        )
    return np.rint(array * 255).astype(np.uint8)


def as_labels(array: np.ndarray, where: str) -> np.ndarray:
    """Return whole-number labels of shape (N,) as int64."""
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise MotleyError(f"{where} must be whole numbers of shape (N,), not {array.dtype} of shape {array.shape}.")
    return array.astype(np.int64)
