"""1,797 handwritten digits of 8 x 8 pixels. They come with Motley; nothing is downloaded.

digits.npz holds the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0), as scikit-learn ships it: `images`
with grey values from 0 to 16, and `labels`.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from motley.core.randomness import generator
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples

FILE = resources.files("motley.data.datasets") / "digits.npz"
TEST_FRACTION = 0.2
#: Fixed, so that runs with different seeds are tested on the same images.
SPLIT_SEED = 0


@DATASETS.register("digits", "1,797 handwritten digits, 8x8 grey, 10 classes; comes with Motley")
def load(source: DataSource) -> Dataset:
    """Read the digits, scale their grey values from 0..16 to 0..255, and split each class 80/20."""
    source.refuse_path("digits")
    with FILE.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        grey = arrays["images"].astype(np.float64)
        labels = arrays["labels"].astype(np.int64)
    images = np.rint(grey * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    is_test = _test_mask(labels)
    train = Examples(images[~is_test], labels[~is_test])
    test = Examples(images[is_test], labels[is_test])
    return Dataset("digits", train, test, classes=10)


def _test_mask(labels: np.ndarray) -> np.ndarray:
    """Mark the test images: the same fraction of every class."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rng = generator(SPLIT_SEED, "digits", int(label))
        members = rng.permutation(np.flatnonzero(labels == label))
        mask[members[: round(TEST_FRACTION * len(members))]] = True
    return mask
