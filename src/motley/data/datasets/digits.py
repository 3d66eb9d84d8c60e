"""Handwritten digits of 8 x 8 pixels: 1,797 real images that come with Motley, so nothing is downloaded.

digits.npz holds the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, CC BY 4.0), as scikit-learn ships it: `images`, grey values from 0 to 16, and `labels`.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from motley.core.randomness import generator
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples

FILE = resources.files("motley.data.datasets") / "digits.npz"
TEST_SHARE = 0.2
#: The split belongs to the data set: runs with other seeds are still tested on the same images.
SPLIT_SEED = 0


@DATASETS.register("digits", "1,797 handwritten digits, 8x8 grey, 10 classes; comes with Motley")
def load(source: DataSource) -> Dataset:
    """Read the digits, stretch their grey values 0..16 to 0..255, and split them 80/20 within each class."""
    source.refuse_path("digits")
    with FILE.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        grey = arrays["images"].astype(np.float64)
        labels = arrays["labels"].astype(np.int64)
    images = np.rint(grey * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    held_out = _held_out(labels)
    train, test = (Examples(images[part], labels[part]) for part in (~held_out, held_out))
    return Dataset("digits", train, test, classes=10)


def _held_out(labels: np.ndarray) -> np.ndarray:
    """Mark the test images: the same share of every class."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator(SPLIT_SEED, "digits", int(label)).permutation(np.flatnonzero(labels == label))
        mask[members[: round(TEST_SHARE * len(members))]] = True
    return mask
