"""Scores of clients on their own test examples, with the task's primary metric.

A client sends only the metric's sums over its test examples: for most metrics a sum of values and
their number (`motley.tasks.Metric`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from motley.core.async_copy import to_device
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.models.moments import normalizes_by_batch
from motley.tasks import Task

#: Names of the sums in a client's answer: before and after local training.
SCORE, PERSONALIZED = "score", "personalized"


class ClientTests:
    """The test examples of every client, on the home device.

    `data` is called when the first client is scored. `partition` says which of its rows belong to
    which client.
    """

    def __init__(
        self,
        data: Callable[[], DeviceData],
        partition: Partition,
        batch_size: int,
        task: Task,
    ) -> None:
        self._data, self.partition, self.batch_size = data, partition, batch_size
        self.task = task

    def count(self, client: int) -> int:
        """Return how many test examples a client has."""
        return len(self.partition.of(client))

    def batches(self, clients: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the test examples of some clients: inputs, targets, and whose each example is.

        The last is a position in `clients`. A batch may hold examples of several clients, so a
        thousand clients with ten examples each are ten batches of a thousand.
        """
        data = self._data()
        lists = [self.partition.of(client) for client in clients]
        counts = [len(rows) for rows in lists]
        rows = to_device(torch.from_numpy(np.concatenate(lists)), data.device)
        places = torch.from_numpy(np.repeat(np.arange(len(clients)), counts))
        places = to_device(places, data.device)
        for first in range(0, len(rows), self.batch_size):
            chosen = slice(first, first + self.batch_size)
            inputs, targets = data.batch(rows[chosen])
            yield inputs, targets, places[chosen]

    def examples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the test examples of one client."""
        for inputs, targets, _ in self.batches([client]):
            yield inputs, targets

    def sums(self, model: nn.Module, clients: Sequence[int]) -> Tensor:
        """Return the primary metric's sums, one row per client.

        One pass over the examples of all these clients, which all have this model. The result is in
        double precision on the device; the host does not wait for it.
        """
        if normalizes_by_batch(model):
            # A client's score must not depend on the examples of others.
            return torch.cat([self._sums(model, [client]) for client in clients])
        return self._sums(model, clients)

    def _sums(self, model: nn.Module, clients: Sequence[int]) -> Tensor:
        sums: Tensor | None = None
        for inputs, targets, places in self.batches(clients):
            outputs, row_targets = self.task.rows(model(inputs), targets)
            added = self.task.primary.row_sums(outputs, row_targets)
            # A sequence of tokens has several rows, all of them its client's.
            places = places.repeat_interleave(len(added) // len(targets))
            if sums is None:
                sums = added.new_zeros(len(clients), added.shape[1])
            sums.index_add_(0, places, added)
        assert sums is not None, "no client has a test example"
        return sums
