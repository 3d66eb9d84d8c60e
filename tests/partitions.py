"""Partitions for tests."""

from __future__ import annotations

import numpy as np

from motley.data.partition import Partition


def joined(lists: list[np.ndarray]) -> Partition:
    """Return a partition of these samples per client."""
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])]).astype(np.int64)
    return Partition(np.concatenate(lists).astype(np.int64), offsets)
