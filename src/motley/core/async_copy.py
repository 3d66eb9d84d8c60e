"""Copies between host and device in which neither waits for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AsyncCopy:
    """A copy of a tensor to the host, queued behind the GPU's work. The host does not wait."""

    def __init__(self, tensor: Tensor) -> None:
        self._end: torch.cuda.Event | None = None
        self._values = tensor.detach()
        if tensor.is_cuda:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values = room.copy_(self._values, non_blocking=True)
            self._end = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def ready(self) -> bool:
        """Whether the values can be read without waiting."""
        return self._end is None or self._end.query()

    def read(self) -> list[Any]:
        """Wait for the copy, and return the values."""
        if self._end is not None:
            self._end.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def tensor_on(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of these numbers on a device, without waiting for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to a device.

    The copy is made from pinned memory: any other copy would make the host wait for all queued work
    of the GPU.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
