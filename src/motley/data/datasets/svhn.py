"""SVHN's cropped digits in their released form: two MATLAB files, read by `mat5`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout, make_examples
from motley.data.datasets.mat5 import read_mat5

LAYOUT = FileLayout("svhn", ("train_32x32.mat", "test_32x32.mat"), folders=("svhn", "SVHN", ""))
#: The training images have 225 MB, without compression.
MAX_BYTES = 400_000_000


@DATASETS.register(
    "svhn",
    "73,257 + 26,032 house numbers, 32x32 colour, 10 classes; the released .mat files",
    paper="Netzer et al. 2011, Reading Digits in Natural Images with Unsupervised Feature Learning",
)
def load(source: DataSource) -> Dataset:
    """Read the training and the test file. The additional training images are not used."""
    source.refuse_path("svhn")
    train, test = [read_file(path) for path in LAYOUT.find(source.root)]
    return Dataset("svhn", train, test, classes=10)


def read_file(path: Path) -> Examples:
    """Return the images and labels of one file.

    It has `X` of shape (height, width, channels, N), and `y` of shape (N, 1) with labels from 1 to
    10. The label 10 stands for the digit 0.
    """
    arrays = read_mat5(path, ("X", "y"), MAX_BYTES)
    stored, labels = arrays["X"], arrays["y"]
    if stored.dtype != np.uint8 or stored.ndim != 4 or stored.shape[:3] != (32, 32, 3):
        raise MotleyError(
            f"{path}: X must be uint8 of shape (32, 32, 3, N), "
            f"not {stored.dtype} of shape {stored.shape}."
        )
    # A vector is a matrix of one column in MATLAB, or of one row.
    if labels.ndim != 2 or min(labels.shape) > 1:
        raise MotleyError(f"{path}: y must have shape (N, 1), not {labels.shape}.")
    labels = labels.ravel()
    if not np.isin(labels, np.arange(1, 11)).all():
        raise MotleyError(
            f"{path}: labels go from {labels.min():g} to {labels.max():g}; they must be whole "
            "numbers from 1 to 10, where 10 stands for the digit 0."
        )
    digits = labels.astype(np.int64) % 10
    images = np.ascontiguousarray(stored.transpose(3, 0, 1, 2))
    return make_examples(images, digits, 10, path)
