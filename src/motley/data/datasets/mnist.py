"""MNIST in its released form: four IDX files, compressed with gzip or not."""

from __future__ import annotations

from motley.data.dataset import DATASETS, Dataset, DataSource, FileLayout
from motley.data.datasets.idx import FILES, load_idx_files

#: The root itself is not searched: Fashion-MNIST's files have the same names, and are looked for
#: there.
LAYOUT = FileLayout("mnist", FILES, folders=("mnist", "MNIST/raw"), endings=("", ".gz"))


@DATASETS.register(
    "mnist",
    "60,000 + 10,000 handwritten digits, 28x28 grey, 10 classes; the released IDX files",
    paper="LeCun, Bottou, Bengio, Haffner 1998, doi:10.1109/5.726791",
)
def load(source: DataSource) -> Dataset:
    """Read the four files from the root's `mnist` folder or from torchvision's `MNIST/raw`."""
    source.refuse_path("mnist")
    return load_idx_files(LAYOUT, source.root)
