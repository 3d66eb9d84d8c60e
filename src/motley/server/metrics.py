"""Numbers that stages and methods report about a round, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from motley.core.async_copy import AsyncCopy

#: Name -> number. Tensors have one element; a GPU may still be computing them.
Metrics: TypeAlias = Mapping[str, Tensor | float]


class PendingMetrics:
    """Metrics on their way from the device to the host, all in one copy."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        self._names = list(tensors)
        self._copy = AsyncCopy(stack_scalars(list(tensors.values())))

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting for the device."""
        return self._copy.ready

    def read(self) -> dict[str, float]:
        """Wait for the device and return the numbers, in the order in which they were reported."""
        copied = dict(zip(self._names, self._copy.read(), strict=True))
        numbers = {}
        for name, value in self._metrics.items():
            numbers[name] = copied[name] if isinstance(value, Tensor) else float(value)
        return numbers


def stack_scalars(scalars: list[Tensor]) -> Tensor:
    """Return one-element tensors as one vector in single precision, empty if there are none."""
    if not scalars:
        return torch.zeros(0)
    return torch.stack([scalar.reshape(()).float() for scalar in scalars])
