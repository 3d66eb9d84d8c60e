"""MNIST with the writer of every digit: a small data set with hundreds of natural clients.

Writers in the test part have written nothing in the training part, so the test score is the score
for new clients. Two forms are read:

- QMNIST's four files (Yadav and Bottou 2019). QMNIST rebuilt MNIST from the NIST forms, in MNIST's
  order, and its label files name the writer. The first 10,000 of its 60,000 test digits are
  MNIST's;
- one file `mnist_writers.npz` with x, y and writer, each for train and test.

Training writers are the clients 0, 1, ...; test writers are numbered after them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import (
    DATASETS,
    Dataset,
    DataSource,
    Examples,
    FileLayout,
    make_examples,
)
from motley.data.datasets.arrays import check_array, read_named_arrays
from motley.data.datasets.idx import CLASSES, SIDE, read_idx, read_idx_ints

LAYOUT = FileLayout(
    "mnist-writers",
    (
        "qmnist-train-images-idx3-ubyte",
        "qmnist-train-labels-idx2-int",
        "qmnist-test-images-idx3-ubyte",
        "qmnist-test-labels-idx2-int",
    ),
    folders=("qmnist", "QMNIST/raw", "mnist-writers"),
    endings=("", ".gz"),
)
ARRAY_LAYOUT = FileLayout("mnist-writers", ("mnist_writers.npz",), folders=("mnist-writers", ""))
#: Columns of QMNIST's label files.
CLASS_COLUMN, WRITER_COLUMN, LABEL_COLUMNS = 0, 2, 8
#: MNIST's own test digits come first in QMNIST's test files.
MNIST_TEST_IMAGES = 10_000
MAX_ARRAY_BYTES = 200_000_000


@DATASETS.register(
    "mnist-writers",
    "60,000 + 10,000 handwritten digits of 539 + 297 writers, 28x28 grey, 10 classes; QMNIST's "
    "files or mnist_writers.npz",
    paper="Yadav and Bottou 2019, Cold Case: The Lost MNIST Digits, arXiv:1905.10498",
)
def load(source: DataSource) -> Dataset:
    """Read the .npz file, or else QMNIST's files."""
    source.refuse_path("mnist-writers")
    if ARRAY_LAYOUT.folder_in(source.root) is not None:
        (path,) = ARRAY_LAYOUT.find(source.root)
        train, test = _read_arrays(path)
        where = path
    else:
        train_images, train_labels, test_images, test_labels = LAYOUT.find(source.root)
        train = _read_qmnist(train_images, train_labels)
        test = _read_qmnist(test_images, test_labels, first=MNIST_TEST_IMAGES)
        where = test_labels
    train, test = _number_writers(train, test, where)
    return Dataset("mnist-writers", train, test, classes=CLASSES)


def _number_writers(train: Examples, test: Examples, where: Path) -> tuple[Examples, Examples]:
    """Number the training writers from 0, and the test writers after them."""
    assert train.clients is not None
    assert test.clients is not None
    train_writers, train_numbers = np.unique(train.clients, return_inverse=True)
    test_writers, test_numbers = np.unique(test.clients, return_inverse=True)
    shared = np.intersect1d(train_writers, test_writers)
    if len(shared):
        raise MotleyError(
            f"{where}: {len(shared)} writers are in the training and in the test part, such as "
            f"number {shared[0]}. The test part must be of other writers."
        )
    return (
        Examples(train.inputs, train.targets, train_numbers.astype(np.int64)),
        Examples(test.inputs, test.targets, len(train_writers) + test_numbers.astype(np.int64)),
    )


def _read_arrays(path: Path) -> tuple[Examples, Examples]:
    keys = []
    for part in ("train", "test"):
        keys += [f"x_{part}", f"y_{part}", f"writer_{part}"]
    arrays = read_named_arrays(path, keys, MAX_ARRAY_BYTES)
    parts = []
    for part in ("train", "test"):
        images = arrays[f"x_{part}"]
        check_array(images, "u", (None, SIDE, SIDE), f"{path}: x_{part}")
        if images.dtype != np.uint8:
            raise MotleyError(f"{path}: x_{part} must be uint8, not {images.dtype}.")
        for key in ("y", "writer"):
            check_array(arrays[f"{key}_{part}"], "iu", (len(images),), f"{path}: {key}_{part}")
        writers = arrays[f"writer_{part}"].astype(np.int64)
        labels = arrays[f"y_{part}"]
        parts.append(make_examples(images[..., np.newaxis], labels, CLASSES, path, writers))
    return parts[0], parts[1]


def _read_qmnist(image_file: Path, label_file: Path, first: int | None = None) -> Examples:
    images = read_idx(image_file, 3)
    if images.shape[1:] != (SIDE, SIDE):
        raise MotleyError(
            f"{image_file}: images must have {SIDE} x {SIDE} pixels, "
            f"not {images.shape[1]} x {images.shape[2]}."
        )
    labels = read_idx_ints(label_file, 2)
    if labels.shape != (len(images), LABEL_COLUMNS):
        raise MotleyError(
            f"{label_file} must have {len(images)} rows, as {image_file.name} has images, of "
            f"{LABEL_COLUMNS} numbers; its shape is {labels.shape}."
        )
    classes = labels[:first, CLASS_COLUMN]
    writers = labels[:first, WRITER_COLUMN].astype(np.int64)
    return make_examples(images[:first, ..., np.newaxis], classes, CLASSES, label_file, writers)
