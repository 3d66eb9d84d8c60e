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
        train = read_data(node, tested=False).train
        check_examples(node, request, "train", train)
        clients, seed = request.config.federation.clients, request.config.seed
        if node.data.dealt:
            return train, request.config.data.partition.split(train.labels, clients, seed)
    # All examples are this client's, and the others have none here.
    count = len(train)
    offsets = np.zeros(clients + 1, dtype=np.int64)
    offsets[node.client + 1 :] = count
    return train, Partition(np.arange(count, dtype=np.int64), offsets)


def read_test_examples(node: NodeSettings, request: Request) -> Examples:
    """Return a node's test examples, on which it evaluates a model of its own."""
    with failing_as("no-test-data"):
        test = read_data(node, tested=True).test
        check_examples(node, request, "test", test)
        return test


def check_examples(node: NodeSettings, request: Request, part: str, examples: Examples) -> None:
    """Refuse images and labels that are not those of the federation."""
    if examples.images.shape[1:] != request.image:
        shape = examples.images.shape[1:]
        raise MotleyError(f"data: {part} images are {shape}; the federation's are {request.image}.")
    lowest, highest = int(examples.labels.min()), int(examples.labels.max())
    if lowest < 0 or highest >= request.classes:
        raise MotleyError(
            f"data set {node.data.name!r}: {part} labels go from {lowest} to {highest}; the "
            f"federation's {request.classes} classes are 0..{request.classes - 1}."
        )


def read_data(node: NodeSettings, *, tested: bool) -> Dataset:
    """Read the data set that a node's own settings name. Training needs no test part."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    return load_dataset(node.data.name, root=root, path=path, tested=tested)


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
