"""CIFAR-100 in its released "python version": two pickled files, read by `cifar_pickle`."""

from __future__ import annotations

from pathlib import Path

from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout
from motley.data.datasets.cifar_pickle import read_cifar_examples

FOLDER = "cifar-100-python"
CLASSES = 100
LAYOUT = FileLayout("cifar100", ("train", "test"), folders=(FOLDER, f"cifar-100/{FOLDER}"))
#: The released training file has 155 MB. Rewritten by Python 3 with protocol 2, it has 220 MB.
MAX_BYTES = 400_000_000


@DATASETS.register(
    "cifar100",
    "50,000 + 10,000 photographs, 32x32 colour, 100 classes; the released python files",
    paper="Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
)
def load(source: DataSource) -> Dataset:
    """Read both files, from `cifar-100-python` or `cifar-100/cifar-100-python`."""
    source.refuse_path("cifar100")
    train, test = [read_file(path) for path in LAYOUT.find(source.root)]
    return Dataset("cifar100", train, test, classes=CLASSES)


def read_file(path: Path) -> Examples:
    """Return the images with their fine labels. The 20 coarse labels are not used."""
    return read_cifar_examples(path, "fine_labels", classes=CLASSES, max_bytes=MAX_BYTES)
