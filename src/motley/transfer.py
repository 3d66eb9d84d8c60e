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
    """Return numbers on a device. From ordinary memory, a GPU would let the host wait for all that is queued before."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
