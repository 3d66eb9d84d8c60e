"""A node's own examples, from the files that its node.toml names. They never leave the node."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.checks import refuse_partition_by_label
from motley.core.errors import MotleyError
from motley.data import Dataset, Examples, Partition, load_dataset
from motley.data.client_tests import all_of_one, hold_out, natural_tests
from motley.data.files.settings import FileSettings
from motley.data.natural import limit_clients
from motley.data.public import (
    HeldOutSettings,
    PublicData,
    PublicDatasetSettings,
    deal,
    public_images,
    refuse_clients_images,
)
from motley.data.settings import FILES
from motley.flower.failures import failing_as
from motley.flower.request import Request
from motley.flower.settings import NodeSettings
from motley.methods import METHODS
from motley.models.inputs import TableShape, TokenShape


def read_examples(node: NodeSettings, request: Request) -> tuple[Examples, Partition]:
    """Return a node's training examples and the client's share, if they fit the run.

    Examples that are held out for the client's own score are not in the share.
    """
    train, partition = _read_share(node, request)
    if request.config.evaluation.client_test_fraction:
        with failing_as("data"):
            partition, _ = _held_out(train, partition, request)
    return train, partition


def read_client_tests(node: NodeSettings, request: Request) -> tuple[Examples, Partition]:
    """Return examples, and which of them the client is tested on.

    They are held-out training examples, or the client's own examples in the test set.
    """
    if request.config.evaluation.client_test_fraction:
        train, partition = _read_share(node, request)
        with failing_as("data"):
            return train, _held_out(train, partition, request)[1]
    test = read_test_examples(node, request)
    clients = request.config.federation.clients
    if not node.data.dealt:
        return test, all_of_one(node.client, clients, len(test))
    train, partition = _read_share(node, request)
    with failing_as("no-test-data"):
        return test, natural_tests(partition, train.clients, test.clients)


def _held_out(
    train: Examples, partition: Partition, request: Request
) -> tuple[Partition, Partition]:
    fraction = request.config.evaluation.client_test_fraction
    return hold_out(partition, train.targets, fraction, request.config.seed)


def _read_share(node: NodeSettings, request: Request) -> tuple[Examples, Partition]:
    """Return a node's training examples and the client's share, if they fit the run."""
    with failing_as("data"):
        train = _read_for(node, request, tested=False).train
        check_examples(node, request, "train", train)
        clients, seed = request.config.federation.clients, request.config.seed
        if node.data.dealt:
            config = request.config
            refuse_partition_by_label(config.data.partition, request.task)
            dealt = deal(train, clients, seed, config.data.partition, config.public)
            return train, dealt.partition
    # All examples are this client's, and the others have none here.
    return train, all_of_one(node.client, clients, len(train))


def read_test_examples(node: NodeSettings, request: Request) -> Examples:
    """Return a node's test examples, on which it evaluates a model of its own."""
    with failing_as("no-test-data"):
        test = _read_for(node, request, tested=True).test
        check_examples(node, request, "test", test)
        return test


def check_examples(node: NodeSettings, request: Request, part: str, examples: Examples) -> None:
    """Refuse inputs and labels that do not fit the federation."""
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
        train = _read_for(node, request, tested=False).train
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


def _read_for(node: NodeSettings, request: Request, *, tested: bool) -> Dataset:
    """Read a node's data set. If it is the server's, it is limited as there."""
    dataset = read_data(node, tested=tested)
    if not node.data.dealt:
        return dataset
    data = request.config.data
    return limit_clients(dataset, data.max_clients, data.max_per_client)


def read_data(node: NodeSettings, *, tested: bool) -> Dataset:
    """Read the data set that a node's own settings name. Training needs no test part."""
    root = Path(node.data.root) if node.data.root else None
    path = Path(node.data.path) if node.data.path else None
    name, files = node.data.name, node.data.files
    if node.data.dealt and name == FILES:
        # The server may have held out a test part, which is then no client's on the nodes either.
        tested = True
    dataset = load_dataset(name, root=root, path=path, tested=tested, files=files)
    if name == FILES and not node.data.dealt:
        _refuse_own_numbers(dataset, files)
    return dataset


def _refuse_own_numbers(dataset: Dataset, files: FileSettings) -> None:
    """Refuse files whose classes, categories or characters would get other numbers on each node."""
    if dataset.class_names and not files.classes:
        raise MotleyError(
            "data.files.classes: is not set. A node's files may lack some classes; node.toml "
            "should list all classes of the federation, so that they have the same numbers on "
            "every node."
        )
    shape = dataset.shape
    if isinstance(shape, TableShape) and shape.categories:
        raise MotleyError(
            "data.files: columns of categories would get other numbers on every node. Write "
            "numbers for them, and leave the columns out with data.files.drop."
        )
    if isinstance(shape, TokenShape) and (dataset.task == "next-token" or files.inputs == "text"):
        raise MotleyError(
            "data.files: characters would get other numbers on every node. Save token numbers in a "
            ".npz file, with data.files.inputs = 'tokens'."
        )


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
