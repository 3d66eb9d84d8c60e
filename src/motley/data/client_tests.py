"""Test examples for every client: its own part of the test set, or some of its training examples.

If the data set records whose examples its test examples are, a client is tested on its own
(`natural_tests`). Otherwise a fraction of each client's training examples can be held out
(`hold_out`); the client then trains on the others only.
"""

from __future__ import annotations

import numpy as np

from motley.core.errors import MotleyError
from motley.core.randomness import generator
from motley.data.partition import Partition

#: Advice for users if clients have no test examples of their own.
ADVICE = "Use evaluation.client_test_fraction to hold out some of every client's training examples."


def hold_out(
    partition: Partition, targets: np.ndarray, fraction: float, seed: int
) -> tuple[Partition, Partition]:
    """Divide each client's examples into training examples and test examples.

    Of its n examples, a client holds out `fraction * n`, rounded, but at least one, and it keeps at
    least one for training. A client with a single example holds out none. The choice depends only
    on the seed, the client's number and its own targets, so that a node can make it alone.
    """
    if len(np.unique(partition.indices)) < len(partition.indices):
        raise MotleyError(
            f"evaluation.client_test_fraction = {fraction:g}: some clients share examples "
            "(data.partition.allow_shared), so that one client would train on the test examples "
            "of another. Use a partition without shared examples."
        )
    indices, offsets = partition.indices, partition.offsets
    targets_by_client = targets[indices]
    is_tested = np.zeros(len(indices), dtype=bool)
    # Only clients that hold out an example draw numbers. With natural clients that is often half of
    # them, and each draw takes 20 microseconds.
    for client in np.flatnonzero(partition.sizes > 1).tolist():
        start, end = offsets[client : client + 2].tolist()
        chosen = held_out_positions(targets_by_client[start:end], fraction, seed, client)
        is_tested[start + chosen] = True
    num_tested = np.concatenate([[0], np.cumsum(is_tested)])
    tested_offsets = num_tested[offsets]
    trained = Partition(indices[~is_tested], offsets - tested_offsets)
    return trained, Partition(indices[is_tested], tested_offsets)


def held_out_positions(targets: np.ndarray, fraction: float, seed: int, client: int) -> np.ndarray:
    """Return which of a client's examples are held out, as positions among its examples.

    They are a systematic sample: the examples are shuffled and sorted by their targets, and every
    (n / k)-th is taken, from a random start. So each class has its share of the k test examples,
    rounded up or down, and numbers of a regression are covered evenly. Targets with several numbers
    per example, such as the tokens of a sequence, are not sorted.
    """
    samples = len(targets)
    count = min(max(1, round(fraction * samples)), samples - 1)
    if count < 1:
        return np.zeros(0, dtype=np.int64)
    rng = generator(seed, "client tests", client)
    order = rng.permutation(samples)
    if targets.ndim == 1:
        order = order[np.argsort(targets[order], kind="stable")]
    places = (np.arange(count) + rng.random()) * (samples / count)
    # Rounding may put the last place at the end itself.
    return order[np.minimum(places.astype(np.int64), samples - 1)]


def natural_tests(
    partition: Partition, train_clients: np.ndarray | None, test_clients: np.ndarray | None
) -> Partition:
    """Return the test examples that belong to each client.

    `train_clients` and `test_clients` name the natural client of every training and test example;
    `partition` says which training examples a client of the federation has. Test examples of
    natural clients that are not in the federation belong to nobody.
    """
    if train_clients is None or test_clients is None:
        raise MotleyError(
            "evaluation.per_client: the data set does not record which client a test example "
            f"belongs to. {ADVICE}"
        )
    owners = np.flatnonzero(partition.sizes)
    names_of_examples = train_clients[partition.indices]
    # The natural client of each client's first example. All its examples should have the same one.
    names = names_of_examples[partition.offsets[owners]]
    is_mixed = np.repeat(names, partition.sizes[owners]) != names_of_examples
    by_name = np.argsort(names)
    names, owners = names[by_name], owners[by_name]
    if is_mixed.any() or (np.diff(names) == 0).any():
        raise MotleyError(
            "evaluation.per_client: a client is tested on the examples of one natural client, and "
            "the partition mixes or divides the natural clients of the data set. "
            f"Use data.partition.name = 'natural'. Or: {ADVICE}"
        )
    rows = np.flatnonzero(np.isin(test_clients, names))
    if not len(rows):
        raise MotleyError(
            "evaluation.per_client: no client of the federation has a test example; the clients of "
            f"the test set do not occur in training. {ADVICE}"
        )
    clients = owners[np.searchsorted(names, test_clients[rows])]
    by_client = np.argsort(clients, kind="stable")
    sizes = np.bincount(clients, minlength=len(partition))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Partition(rows[by_client].astype(np.int64), offsets)


def all_of_one(client: int, clients: int, examples: int) -> Partition:
    """Return a partition in which one client has all examples, as on a node with its own data."""
    offsets = np.zeros(clients + 1, dtype=np.int64)
    offsets[client + 1 :] = examples
    return Partition(np.arange(examples, dtype=np.int64), offsets)
