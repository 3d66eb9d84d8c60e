"""Handwritten digits of 8 x 8 pixels: 1,797 real images that come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import numpy as np

from motley.core.randomness import generator
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples

TEST_SHARE = 0.2
SPLIT_SEED = 0
"""The split belongs to the data set: runs with other seeds are still tested on the same images."""


@DATASETS.register("digits", "1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn")
def load(source: DataSource) -> Dataset:
    """Read the digits, stretch their grey values 0..16 to 0..255, and split them 80/20 within each class."""
    source.refuse_path("digits")
    from sklearn.datasets import load_digits  # here, because importing it takes as long as a small run

    raw = load_digits()
    images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = raw.target.astype(np.int64)
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
