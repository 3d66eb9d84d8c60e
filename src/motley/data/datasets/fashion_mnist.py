"""Fashion-MNIST in its released form: four IDX files, compressed with gzip or not."""

from __future__ import annotations

from motley.data.dataset import DATASETS, Dataset, DataSource, FileLayout
from motley.data.datasets.idx import FILES, load_idx_files

LAYOUT = FileLayout(
    "fashion-mnist", FILES, folders=("", "fashion-mnist", "FashionMNIST/raw"), endings=("", ".gz")
)


@DATASETS.register(
    "fashion-mnist",
    "60,000 + 10,000 pictures of clothes, 28x28 grey, 10 classes; the released IDX files",
    paper="Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747",
)
def load(source: DataSource) -> Dataset:
    """Read the four files.

    They may be in the root, in its `fashion-mnist` folder or in torchvision's `FashionMNIST/raw`.
    """
    source.refuse_path("fashion-mnist")
    return load_idx_files(LAYOUT, source.root)
