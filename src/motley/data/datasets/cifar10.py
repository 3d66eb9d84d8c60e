"""CIFAR-10 in its released "python version": six pickled batches, read by `cifar_pickle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, find_files
from motley.data.datasets.cifar_pickle import read_pickled_batch

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
#: The released files have 31 MB each. Rewritten by Python 3 with protocol 2, they have 44 MB.
MAX_BYTES = 100_000_000


@DATASETS.register(
    "cifar10",
    "50,000 + 10,000 photographs, 32x32 colour, 10 classes; the released python batches",
    paper="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
)
def load(source: DataSource) -> Dataset:
    """Read the six batches.

    They may be in `cifar-10-batches-py`, in `cifar-10/cifar-10-batches-py` or in the root itself.
    """
    source.refuse_path("cifar10")
    folders = [source.root / FOLDER, source.root / "cifar-10" / FOLDER, source.root]
    paths = find_files("cifar10", source, folders, (*TRAIN_FILES, TEST_FILE))
    *train, test = [read_batch(path) for path in paths]
    images = np.concatenate([batch.images for batch in train])
    labels = np.concatenate([batch.labels for batch in train])
    return Dataset("cifar10", Examples(images, labels), test, classes=10)


def read_batch(path: Path) -> Examples:
    """Return one batch, with channels last.

    The file stores an image as a row of 1,024 red, then 1,024 green, then 1,024 blue bytes.
    """
    batch = read_pickled_batch(path, MAX_BYTES)
    data, labels = _value(batch, "data", path), _value(batch, "labels", path)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072:
        is_array = isinstance(data, np.ndarray)
        actual = f"{data.dtype} {data.shape}" if is_array else type(data).__name__
        raise MotleyError(f"{path}: 'data' must be bytes of shape (N, 3072), not {actual}.")
    if not isinstance(labels, list) or not all(map(_is_label, labels)):
        raise MotleyError(f"{path}: 'labels' must be a list of whole numbers in 0..9.")
    images = np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Examples(images, np.array(labels, dtype=np.int64))


def _is_label(value: object) -> bool:
    # `type(...) is int` and not `isinstance`, which would accept True and False.
    return type(value) is int and 0 <= value < 10


def _value(batch: dict[str, Any], key: str, path: Path) -> Any:
    if key not in batch:
        raise MotleyError(f"{path} is not a CIFAR-10 batch: it has no {key!r}.")
    return batch[key]
