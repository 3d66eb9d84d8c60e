"""A node's own examples, from the files that its node.toml names. They never leave the node."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data import Dataset, Examples, Partition, load_dataset
from motley.flower.failures import failing_as
from motley.flower.request import Request
from motley.flower.settings import NodeSettings


def read_examples(node: NodeSettings, request: Request) -> tuple[Examples, Partition]:
    """Return a node's training examples and the client's share, if they fit the run."""
    with failing_as("data"):
        train = read_data(node).train
        if train.images.shape[1:] != request.image:
            raise MotleyError(
                f"data: images are {train.images.shape[1:]}; the federation's are {request.image}."
            )
        lowest, highest = int(train.labels.min()), int(train.labels.max())
        if lowest < 0 or highest >= request.classes:
            raise MotleyError(
                f"data set {node.data.name!r}: train labels go from {lowest} to {highest}; the "
                f"federation's {request.classes} classes are 0..{request.classes - 1}."
            )
        clients, seed = request.config.federation.clients, request.config.seed
        if node.data.dealt:
            return train, request.config.data.partition.split_examples(train, clients, seed)
    # All examples are this client's, and the others have none here.
    count = len(train)
    offsets = np.zeros(clients + 1, dtype=np.int64)
    offsets[node.client + 1 :] = count
    return train, Partition(np.arange(count, dtype=np.int64), offsets)


def read_data(node: NodeSettings) -> Dataset:
    """Read the data set that a node's own settings name. A node needs no test part."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    return load_dataset(node.data.name, root=root, path=path, tested=False)


def stamp_of(node: NodeSettings) -> tuple[object, ...]:
    """Return a value that changes when the files or folders that node.toml names are replaced."""
    stamps: list[object] = []
    for path in (node.data.path, node.data.root, node.data.partition):
        try:
            status = Path(path).stat() if path else None
        except OSError:
            status = None
        stamps.append(status and (status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)
