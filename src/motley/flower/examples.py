"""A node's own examples, from the files that its node.toml names. They never leave the node."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data import Dataset, Examples, Partition, load_dataset
from motley.data.public import (
    HeldOutSettings,
    PublicData,
    PublicDatasetSettings,
    deal,
    public_images,
    refuse_clients_images,
)
from motley.flower.failures import failing_as
from motley.flower.request import Request
from motley.flower.settings import NodeSettings
from motley.methods import METHODS


def read_examples(node: NodeSettings, request: Request) -> tuple[Examples, Partition]:
    """Return a node's training examples and the client's share, if they fit the run."""
    with failing_as("data"):
        train = read_data(node, tested=False).train
        check_examples(node, request, "train", train)
        clients, seed = request.config.federation.clients, request.config.seed
        if node.data.dealt:
            config = request.config
            dealt = deal(train, clients, seed, config.data.partition, config.public)
            return train, dealt.partition
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
    """Refuse inputs and labels that are not those of the federation."""
    if examples.shape != request.shape:
        raise MotleyError(
            f"data: {part} inputs are {examples.shape}; the federation's are {request.shape}."
        )
    if examples.targets.dtype.kind == "f":
        return
    lowest, highest = int(examples.targets.min()), int(examples.targets.max())
    if lowest < 0 or highest >= request.classes:
        raise MotleyError(
            f"data set {node.data.name!r}: {part} labels go from {lowest} to {highest}; the "
            f"federation's {request.classes} classes are 0..{request.classes - 1}."
        )


def read_public(node: NodeSettings, request: Request) -> PublicData | None:
    """Return the run's public images, read from this node's own files.

    They are None if the method's clients do not use them. Both sides draw them by the run's seed,
    so a row means the same image here and at the server.
    """
    config = request.config
    if not METHODS[config.method.name].requirements.client_public_data:
        return None
    with failing_as("data"):
        public = config.public
        train = read_data(node, tested=False).train
        held_out = np.zeros(0, dtype=np.int64)
        if isinstance(public, HeldOutSettings):
            if not node.data.dealt:
                raise MotleyError(
                    "public.name = 'held-out': the public images are training examples of the "
                    "server's data set, and this node has examples of its own (data.dealt = false)."
                )
            clients = config.federation.clients
            held_out = deal(train, clients, config.seed, config.data.partition, public).held_out
        root = Path(node.data.root) if node.data.root else None
        images = public_images(public, train, held_out, config.seed, root)
        if isinstance(public, PublicDatasetSettings):
            refuse_clients_images(images, train.inputs, f"public.name = {public.name!r}")
        return PublicData(images, config.data.transform)


def read_data(node: NodeSettings, *, tested: bool) -> Dataset:
    """Read the data set that a node's own settings name. Training needs no test part."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    return load_dataset(node.data.name, root=root, path=path, tested=tested)


def stamp_of(node: NodeSettings) -> tuple[object, ...]:
    """Return a value that changes when the files or folders that node.toml names are replaced."""
    stamps: list[object] = []
    for path in (node.data.path, node.data.root, node.data.partition, node.data.public):
        try:
            status = Path(path).stat() if path else None
        except OSError:
            status = None
        stamps.append(status and (status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)
