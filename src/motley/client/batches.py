"""A client's batches on the device, read by a counter there: no step asks the host for the next
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motley.client.training import Plan
from motley.core.async_copy import tensor_on
from motley.data.device import DRAWS, DeviceData

#: Maximum memory for a client's prepared batches.
PREPARED_BYTES = 256 * 2**20


class Batches:
    """The plan of a client's round, and its images if they are not too large.

    Images that fit are prepared once, when the plan is loaded: the kernels for index, crop, flip
    and cutout, small as they are, would otherwise take a fifth of a small model's step. A lean
    client has memory for one batch of images only, and prepares each batch when it is needed.
    """

    def __init__(
        self,
        data: DeviceData,
        batch_size: int,
        longest: int,
        dtype: torch.dtype,
        lean: bool = False,
    ) -> None:
        device, shape = data.device, data.shape
        self.data, self.dtype = data, dtype
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._rows = torch.zeros((longest, batch_size), dtype=torch.long, device=device)
        self._draws = torch.zeros((longest, batch_size, DRAWS if data.random else 0), device=device)
        self._labels = torch.zeros_like(self._rows)
        room = (longest, batch_size, shape.height, shape.width, shape.channels)
        fits = torch.Size(room).numel() * dtype.itemsize <= PREPARED_BYTES and not lean
        self._images = torch.zeros(room, dtype=dtype, device=device) if fits else None
        # Filled like the prepared batches, so that images have the same strides, and convolutions
        # the same bits.
        self._batch = torch.zeros(room[1:], dtype=dtype, device=device) if lean else None

    def load(self, plan: Plan) -> None:
        """Load a plan and point at its first batch."""
        self.rewind()
        steps = len(plan.lengths)
        if not steps:
            return
        self._rows[:steps].copy_(self._pinned(plan.rows), non_blocking=True)
        if plan.draws is not None:
            self._draws[:steps].copy_(self._pinned(plan.draws), non_blocking=True)
        if self._images is not None:
            draws = self._draws[:steps].flatten(0, 1) if self.data.random else None
            self.data.fill(self._images[:steps].flatten(0, 1), self._rows[:steps].flatten(), draws)
            self._labels[:steps] = self.data.labels[self._rows[:steps]]

    def rewind(self) -> None:
        """Point at the first batch."""
        self._cursor.zero_()

    def next(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` examples of the current batch, and point at the next batch."""
        if self._images is not None:
            images = self._first(self._images, length).permute(0, 3, 1, 2)
            labels = self._first(self._labels, length)
        else:
            rows = self._first(self._rows, length)
            draws = self._first(self._draws, length) if self.data.random else None
            if self._batch is None:
                images, labels = self.data.batch(rows, draws)
            else:
                self.data.fill(self._batch[:length], rows, draws)
                images, labels = self._batch[:length].permute(0, 3, 1, 2), self.data.labels[rows]
        self._cursor.add_(1)
        return images.to(self.dtype), labels

    def first(self, count: int, lengths: Sequence[int]) -> Tensor:
        """Return the first `count` images of the plan, given its batches' lengths; they repeat if
        there are fewer.
        """
        batch_size = self._rows.shape[1]
        places: list[int] = []
        for step, length in enumerate(lengths):
            places.extend(range(step * batch_size, step * batch_size + length))
        places = places[:count]
        repeated = [places[at % len(places)] for at in range(count)]
        chosen = tensor_on(repeated, torch.long, self.data.device)
        draws = self._draws.flatten(0, 1)[chosen] if self.data.random else None
        return self.data.batch(self._rows.flatten()[chosen], draws)[0].to(self.dtype)

    def _first(self, room: Tensor, length: int) -> Tensor:
        """Return the current batch's part of a tensor. On a CPU the counter can be read, so no copy
        is needed.
        """
        if room.is_cuda:
            return room.index_select(0, self._cursor)[0, :length]
        return room[int(self._cursor), :length]

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.data.device.type == "cuda" else tensor
