"""A client's batches on the device. On a GPU a counter there points at the next one, so that a
captured step can be replayed; on a CPU the counter is a plain number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motley.client.training import Plan
from motley.core.async_copy import tensor_on
from motley.data.device import DeviceData
from motley.models.inputs import input_dtype

#: Maximum memory for a client's prepared batches.
PREPARED_BYTES = 256 * 2**20


class Batches:
    """The plan of a client's round, and its inputs if they are not too large.

    Inputs that fit are prepared once, when the plan is loaded: the kernels for index, crop, flip
    and cutout, small as they are, would otherwise take a fifth of a small model's step. A lean
    client has memory for one batch of inputs only, and prepares each batch when it is needed.
    """

    def __init__(
        self,
        data: DeviceData,
        batch_size: int,
        longest: int,
        dtype: torch.dtype,
        lean: bool = False,
    ) -> None:
        device = data.device
        #: The type of a batch: the one that the model computes in, except for tokens and tables.
        self.dtype = dtype = input_dtype(data.shape, dtype)
        self.data = data
        #: The number of the current batch: on the host for a CPU, on the device for a GPU.
        self._position = 0
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._rows = torch.zeros((longest, batch_size), dtype=torch.long, device=device)
        self._draws = torch.zeros((longest, batch_size, data.num_draws), device=device)
        self._mix = torch.ones(longest, device=device)
        self._targets = torch.zeros(
            (longest, batch_size, *data.targets.shape[1:]), dtype=data.targets.dtype, device=device
        )
        room = (longest, batch_size, *data.prepared_dims())
        fits = torch.Size(room).numel() * dtype.itemsize <= PREPARED_BYTES and not lean
        self._inputs = torch.zeros(room, dtype=dtype, device=device) if fits else None
        # Filled like the prepared batches, so that inputs have the same strides, and convolutions
        # the same bits.
        self._batch = torch.zeros(room[1:], dtype=dtype, device=device) if lean else None

    @property
    def num_bytes(self) -> int:
        """The bytes of the prepared inputs, which are by far the largest of its tensors."""
        return 0 if self._inputs is None else self._inputs.nbytes

    def load(self, plan: Plan) -> None:
        """Load a plan and point at its first batch."""
        self.rewind()
        steps = len(plan.lengths)
        if not steps:
            return
        self._rows[:steps].copy_(self._pinned(plan.rows), non_blocking=True)
        if plan.draws is not None:
            self._draws[:steps].copy_(self._pinned(plan.draws), non_blocking=True)
        if plan.mix is not None:
            self._mix[:steps].copy_(self._pinned(plan.mix), non_blocking=True)
        if self._inputs is not None:
            rows = self._rows[:steps].flatten()
            draws = self._draws[:steps].flatten(0, 1) if self.data.random else None
            self.data.fill(self._inputs[:steps].flatten(0, 1), rows, draws)
            targets = self.data.targets.index_select(0, rows)
            self._targets[:steps].flatten(0, 1).copy_(targets)

    def rewind(self) -> None:
        """Point at the first batch."""
        self._position = 0
        if self._cursor.is_cuda:
            self._cursor.zero_()

    def mix(self) -> Tensor:
        """Return the weight of an example's own input in the current batch, for mixup."""
        if self._cursor.is_cuda:
            return self._mix.index_select(0, self._cursor)
        return self._mix[self._position : self._position + 1]

    def next(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` examples of the current batch, and point at the next batch."""
        if self._inputs is not None:
            inputs = self.data.from_prepared(self._first(self._inputs, length))
            targets = self._first(self._targets, length)
        else:
            rows = self._first(self._rows, length)
            draws = self._first(self._draws, length) if self.data.random else None
            if self._batch is None:
                inputs, targets = self.data.batch(rows, draws)
            else:
                self.data.fill(self._batch[:length], rows, draws)
                inputs = self.data.from_prepared(self._batch[:length])
                targets = self.data.targets[rows]
        if self._cursor.is_cuda:
            self._cursor.add_(1)
        else:
            self._position += 1
        return inputs.to(self.dtype), targets

    def first(self, count: int, lengths: Sequence[int]) -> Tensor:
        """Return the first `count` inputs of the plan, given its batches' lengths; they repeat if
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
        """Return the current batch's part of a tensor. On a CPU it is a view, not a copy."""
        if room.is_cuda:
            return room.index_select(0, self._cursor)[0, :length]
        return room[self._position, :length]

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.data.device.type == "cuda" else tensor
