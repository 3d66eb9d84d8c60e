"""CIFAR-10 in its released "python version": six pickled batches.

A pickle is a program, and these files are passed around. They are therefore read by an unpickler that knows the four
names an array of bytes needs and refuses every other, before anything of that name is imported or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, find_files
from motley.errors import MotleyError

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"


@DATASETS.register(
    "cifar10",
    "50,000 + 10,000 photographs, 32x32 colour, 10 classes; the released python batches",
    paper="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
)
def load(source: DataSource) -> Dataset:
    """Read the batches from `cifar-10-batches-py` in the root or in its `cifar-10` folder, or from the root itself."""
    source.refuse_path("cifar10")
    folders = [source.root / FOLDER, source.root / "cifar-10" / FOLDER, source.root]
    *train, test = map(read_batch, find_files("cifar10", source, folders, (*TRAIN_FILES, TEST_FILE)))
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Dataset("cifar10", Examples(images, labels), test, classes=10)


def read_batch(path: Path) -> Examples:
    """Return one batch: rows of 1,024 red, 1,024 green and 1,024 blue bytes become images with channels last."""
    batch = _unpickle(path)
    if not isinstance(batch, dict):
        raise MotleyError(f"{path} is not a CIFAR-10 batch: it holds a {type(batch).__name__}, not a dict.")
    data, labels = (_value(batch, key, path) for key in ("data", "labels"))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise MotleyError(f"{path}: 'data' must be bytes of shape (N, 3072), not {found}.")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise MotleyError(f"{path}: 'labels' must be a list of whole numbers in 0..9.")
    images = np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Examples(images, np.array(labels, dtype=np.int64))


def _value(batch: Mapping[Any, Any], key: str, path: Path) -> Any:
    """Look a key up as bytes, as the release spells it when read by Python 3, or as text."""
    for spelling in (key.encode(), key):
        if spelling in batch:
            return batch[spelling]
    raise MotleyError(f"{path} is not a CIFAR-10 batch: it has no {key!r}.")


def _unpickle(path: Path) -> Any:
    try:
        return _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except MotleyError as error:
        raise MotleyError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise MotleyError(f"{path} is truncated or damaged: {type(error).__name__}: {error}.") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Loads lists, dicts, numbers, byte strings and NumPy arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise MotleyError(
                f"refused to load {module}.{name}, which no CIFAR-10 batch needs. Nothing was run; "
                "do not trust this file."
            )
        return _ALLOWED[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`: protocol 2 has no bytes, so Python 3 writes them as text to encode as latin1."""
    if encoding not in ("latin1", b"latin1"):
        raise MotleyError(f"refused to encode as {encoding!r}.")
    return text.encode("latin1")


def _dtype(code: str | bytes, align: object = False, copy: object = False) -> np.dtype[Any]:
    """Stand in for `numpy.dtype`, which warns of the 0 and 1 that the original release has for False and True."""
    return np.dtype(code.decode() if isinstance(code, bytes) else code, bool(align), bool(copy))


_reconstruct = np.empty(0).__reduce__()[0]

_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}
