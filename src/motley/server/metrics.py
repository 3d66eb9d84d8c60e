"""Numbers that stages and methods report about a round, and how they are read from the device without waiting."""

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
        self._numbers = {name: value for name, value in metrics.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        self._names, self._tensors = list(metrics), list(tensors)
        self._copy = AsyncCopy(stack_scalars(list(tensors.values())))

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting for the device."""
        return self._copy.ready

    def read(self) -> dict[str, float]:
        """Wait for the device and return the numbers, in the order in which they were reported."""
        values = {**self._numbers, **dict(zip(self._tensors, self._copy.read(), strict=True))}
        return {name: float(values[name]) for name in self._names}


def stack_scalars(scalars: list[Tensor]) -> Tensor:
    """Return one-element tensors as one vector in single precision; an empty one on the host if there are none."""
    if not scalars:
        return torch.zeros(0)
    return torch.stack([scalar.reshape(()).float() for scalar in scalars])
