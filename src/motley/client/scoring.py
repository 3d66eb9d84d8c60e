"""Scores of clients on their own test examples: per-example values, summed per client.

What leaves a client are two numbers per score: the sum of the metric's values over its test
examples, and the number of these examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from motley.core.async_copy import to_device
from motley.data.device import DeviceData
from motley.data.partition import Partition

#: Names of the sums in a client's answer: of the model as it is, and after local training. Each is
#: a vector of two numbers, the sum of the values and the number of test examples.
SCORE, PERSONALIZED = "score", "personalized"


class ExampleMetric(Protocol):
    """A metric that is a mean over examples, or a function of one."""

    #: Such as "accuracy".
    name: str
    higher_is_better: bool
    #: No mean can be below the first or above the second.
    bounds: tuple[float, float]

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one number per example, in double precision."""
        ...

    def score(self, mean: float) -> float:
        """Return the score of a client from the mean of its examples' values."""
        ...


class Accuracy:
    """1 for every correct prediction."""

    name = "accuracy"
    higher_is_better = True
    bounds = (0.0, 1.0)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for a correct prediction and 0 for a wrong one."""
        return (outputs.argmax(1) == targets).double()

    def score(self, mean: float) -> float:
        """Return the mean itself."""
        return mean


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
        metric: ExampleMetric,
    ) -> None:
        self._data, self.partition, self.batch_size = data, partition, batch_size
        self.metric = metric

    def count(self, client: int) -> int:
        """Return how many test examples a client has."""
        return int(self.partition.sizes[client])

    def batches(self, clients: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the test examples of some clients: inputs, targets, and whose each example is.

        The last is a position in `clients`. Batches take no notice of where one client's examples
        end, so a thousand clients with ten examples each are ten batches of a thousand.
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

    def totals(self, model: nn.Module, clients: Sequence[int]) -> Tensor:
        """Return the sum of the metric's values and the number of examples, one row per client.

        One pass over the examples of all these clients, which all have this model. The result is in
        double precision on the device; the host does not wait for it.
        """
        sums: Tensor | None = None
        for inputs, targets, places in self.batches(clients):
            values = self.metric.values(model(inputs), targets)
            if sums is None:
                sums = torch.zeros(len(clients), dtype=torch.float64, device=values.device)
            sums.index_add_(0, places, values)
        assert sums is not None, "no client has a test example"
        counts = torch.tensor([self.count(client) for client in clients], dtype=torch.float64)
        return torch.stack([sums, to_device(counts, sums.device)], dim=1)
