"""Adam in one kernel over all tensors.

torch's grouped Adam hands out pieces of 65,536 values, too few pieces to fill a large GPU with a small model. This one
reads from a table on the device where all pieces lie, so it is a single launch whose pieces are small. It computes what
torch.optim.Adam and AdamW compute, and writes 16-bit copies of the weights on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096
"""Values that a program steps."""
FIELDS = 6
"""Columns of the table: where weight, gradient and the two moments lie, the number of values, and where a copy lies."""
NO_COPY = -(2**62)


@triton.jit
def _step(
    base, shadow, table, lr, counter, programs, log_beta1, log_beta2, rest1, rest2, beta1, beta2, eps, decay,
    DECOUPLED: tl.constexpr, COPIES: tl.constexpr, NONE: tl.constexpr, FIELDS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * FIELDS
    number = (tl.load(counter) + 1).to(tl.float64)
    correction1 = (1.0 - tl.exp(number * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(number * log_beta2)).to(tl.float32)
    size = tl.load(lr) / correction1
    shrink = 1.0 - tl.load(lr) * decay
    count = tl.load(row + 4)
    if count == PIECE:
        _update(
            base, shadow, row, PIECE, size, shrink, tl.sqrt(correction2), rest1, rest2, beta1, beta2, eps, decay,
            DECOUPLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    else:
        _update(
            base, shadow, row, count, size, shrink, tl.sqrt(correction2), rest1, rest2, beta1, beta2, eps, decay,
            DECOUPLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    if tl.atomic_add(counter + 1, 1) == programs - 1:
        tl.store(counter + 1, 0)
        tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _update(
    base, shadow, row, count, size, shrink, root, rest1, rest2, beta1, beta2, eps, decay,
    DECOUPLED: tl.constexpr, COPIES: tl.constexpr, NONE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Step one piece; where `count` is known to be PIECE, the compiler drops the mask and loads widely."""
    at = tl.arange(0, PIECE)
    inside = at < count
    weights = base + tl.multiple_of(tl.load(row), 4) + at
    gradients = base + tl.multiple_of(tl.load(row + 1), 4) + at
    firsts = base + tl.multiple_of(tl.load(row + 2), 4) + at
    seconds = base + tl.multiple_of(tl.load(row + 3), 4) + at
    w = tl.load(weights, mask=inside, other=0.0)
    g = tl.load(gradients, mask=inside, other=0.0)
    if DECOUPLED:
        w *= shrink
    else:
        g += decay * w
    m = beta1 * tl.load(firsts, mask=inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(seconds, mask=inside, other=0.0) + rest2 * g * g
    tl.store(firsts, m, mask=inside)
    tl.store(seconds, v, mask=inside)
    w -= size * m / (tl.sqrt(v) / root + eps)
    tl.store(weights, w, mask=inside)
    if COPIES:
        copy = tl.load(row + 5)
        if copy != NONE:
            tl.store(shadow + tl.multiple_of(copy, 8) + at, w.to(shadow.dtype.element_ty), mask=inside)


class FusedAdam(torch.optim.Optimizer):
    """Steps tensors that stay where they are; gradients that do not are copied to where they are expected."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lr: Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        decoupled: bool,
        copies: Sequence[Tensor | None] = (),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(tensors, {"lr": lr})
        self.tensors = list(tensors)
        self.copies = list(copies) or [None] * len(self.tensors)
        """For each tensor, what is to hold its values in 16 bits."""
        self._shadow = next((copy.detach() for copy in self.copies if copy is not None), None)
        self.lr, self.betas, self.weight_decay, self.decoupled, self.eps = lr, betas, weight_decay, decoupled, eps
        self.gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in self.tensors]
        self.moments = torch.zeros((2, sum(_room(tensor) for tensor in self.tensors)), device=lr.device)
        self.counter = torch.zeros(2, dtype=torch.int32, device=lr.device)
        """Steps taken; programs of the present step that are done."""
        self.state[self.tensors[0]] = {"moments": self.moments, "counter": self.counter}
        self.table = self._pieces().to(lr.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with the tensors' gradients."""
        elsewhere = [
            (room, tensor.grad)
            for room, tensor in zip(self.gradients, self.tensors, strict=True)
            if tensor.grad is not None and tensor.grad is not room
        ]
        if elsewhere:
            rooms, gradients = zip(*elsewhere, strict=True)
            torch._foreach_copy_(rooms, gradients)
        beta1, beta2 = self.betas
        _step[(len(self.table),)](
            self.moments, self.moments if self._shadow is None else self._shadow, self.table, self.lr, self.counter,
            len(self.table), _log(beta1), _log(beta2),
            1 - beta1, 1 - beta2, beta1, beta2, self.eps, self.weight_decay,
            DECOUPLED=self.decoupled, COPIES=self._shadow is not None, NONE=NO_COPY, FIELDS=FIELDS, PIECE=PIECE,
        )  # fmt: skip

    def _pieces(self) -> Tensor:
        """Return the table: distances from the moments' address, and of copies from the first one's, in values."""
        rows, start = [], 0
        for tensor, gradient, copy in zip(self.tensors, self.gradients, self.copies, strict=True):
            assert gradient.stride() == tensor.stride() and (copy is None or copy.stride() == tensor.stride())
            for first in range(0, tensor.numel(), PIECE):
                live = (_distance(t, self.moments) + first for t in (tensor, gradient))
                moments = (start + first, self.moments.shape[1] + start + first)
                to = NO_COPY if copy is None or self._shadow is None else _distance(copy, self._shadow) + first
                rows.append((*live, *moments, min(PIECE, tensor.numel() - first), to))
            start += _room(tensor)
        return torch.tensor(rows, dtype=torch.long)


def _distance(tensor: Tensor, base: Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def _room(tensor: Tensor) -> int:
    """Return a tensor's values, rounded up so that the next one's moments begin at an aligned address."""
    return -(-tensor.numel() // 4) * 4


def _log(beta: float) -> float:
    return math.log(max(beta, 1e-30))
