"""Values from the device to the host and back, without either waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Later:
    """A tensor's values for the host, which need not wait for a GPU to compute them: the copy is queued behind them."""

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
        """Return the values, once the device is done."""
        if self._end is not None:
            self._end.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device."""
    return queued(torch.tensor(values, dtype=dtype), device)


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on a device. From ordinary memory, the host would wait for all that a GPU has to do."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
