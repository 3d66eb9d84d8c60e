"""Fewer natural clients, and fewer examples of each, than a data set has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import Dataset


def limit_clients(dataset: Dataset, max_clients: int, max_per_client: int) -> Dataset:
    """Return a data set with at most so many clients, and examples per client; 0: no limit.

    The same clients are left in the training and in the test part. Test clients without any
    training example do not take part in a federation, so their number is not limited. The choice
    does not depend on a seed: clients and examples are taken at equal distances.
    """
    if not max_clients and not max_per_client:
        return dataset
    train, test = dataset.train, dataset.test
    if train.clients is None or test.clients is None:
        key = "max_clients" if max_clients else "max_per_client"
        value = max_clients or max_per_client
        raise MotleyError(
            f"data.{key} = {value}: data set {dataset.name!r} does not record whose examples they "
            "are. Use 0."
        )
    names = np.unique(train.clients)
    dropped = names[~np.isin(names, names[equally_spaced(len(names), max_clients)])]
    train = train.rows(_rows(train.clients, dropped, max_per_client))
    test = test.rows(_rows(test.clients, dropped, max_per_client))
    if dataset.tested and not len(test):
        raise MotleyError(
            f"data.max_clients = {max_clients}: none of these clients has test examples."
        )
    return replace(dataset, train=train, test=test)


def equally_spaced(count: int, limit: int) -> np.ndarray:
    """Return `limit` of the numbers 0 to count - 1, at equal distances; 0: all of them."""
    if not limit or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def _rows(clients: np.ndarray, dropped: np.ndarray, limit: int) -> np.ndarray:
    """Return the rows of clients that are not dropped, at most `limit` of each, in order."""
    by_client = np.argsort(clients, kind="stable")
    names, starts, counts = np.unique(clients[by_client], return_index=True, return_counts=True)
    taken = np.minimum(counts, limit) if limit else counts.copy()
    taken[np.isin(names, dropped)] = 0
    # As `equally_spaced`, for all clients at once: of n examples, example rank * n // taken.
    rank = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    place = rank * np.repeat(counts, taken) // np.repeat(taken, taken)
    return np.sort(by_client[np.repeat(starts, taken) + place])
