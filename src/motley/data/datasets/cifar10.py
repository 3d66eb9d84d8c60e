"""CIFAR-10 in its released "python version": six pickled batches, read by `cifar_pickle`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout
from motley.data.datasets.cifar_pickle import read_cifar_examples

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
LAYOUT = FileLayout(
    "cifar10", (*TRAIN_FILES, TEST_FILE), folders=(FOLDER, f"cifar-10/{FOLDER}", "")
)
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
    *train, test = [read_batch(path) for path in LAYOUT.find(source.root)]
    images = np.concatenate([batch.inputs for batch in train])
    labels = np.concatenate([batch.targets for batch in train])
    return Dataset("cifar10", Examples(images, labels), test, classes=10)


def read_batch(path: Path) -> Examples:
    """Return one batch, with channels last."""
    return read_cifar_examples(path, "labels", classes=10, max_bytes=MAX_BYTES)
