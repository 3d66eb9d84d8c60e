"""Adam and SGD in one kernel over all tensors.

torch's grouped optimisers hand out pieces of 65,536 values, too few pieces to fill a large GPU with a small model. Here
a table on the device says where all pieces lie, so a step is a single launch whose pieces are small. It computes what
torch.optim's Adam, AdamW and SGD compute. With 16-bit copies of the weights it reads their gradients as backward left
them, undoes the scale of the loss, and writes the new copies on the way: no value passes through memory twice. A pull
towards other weights, as of a proximal term, is one more value to read. Only where the loss has a scale the gradients
are looked through first: a step with one that is not finite is left out, and the scale halved (`LossScale`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor


class LossScale(Protocol):
    """The factor on the loss in fp16, on the device (`motley.client.weights.LossScale`)."""

    HIGHEST: float
    LOWEST: float
    PATIENCE: int
    value: Tensor
    good: Tensor
    found: Tensor


class Weights(Protocol):
    """The trained tensors' 16-bit copies and gradients (`motley.client.weights.Weights`)."""

    copies: list[Tensor | None]
    scaled: bool

    @property
    def raw_gradients(self) -> list[Tensor | None]:
        """The gradients, where backward left them."""
        ...


PIECE = 4096
"""Values that a program steps."""
FIELDS = 9
"""Columns of the table: where weight, first and second moment and copy lie; the number of values; where the gradient
lies, and whether it is one in 16 bits; where that lies to which the weight is pulled, and how strongly, as a float's
bits.
"""
GRADIENT, PULL = 5, 7
"""The first columns of what differs from step to step."""
NO_COPY = -(2**62)


@triton.jit
def _look(base, shadow, table, found, COPIES: tl.constexpr, FIELDS: tl.constexpr, PIECE: tl.constexpr):
    """Write a one where a gradient is not finite."""
    row = table + tl.program_id(0) * FIELDS
    count = tl.load(row + 4)
    if count == PIECE:
        g = _gradient(base, shadow, row, PIECE, COPIES, PIECE)
    else:
        g = _gradient(base, shadow, row, count, COPIES, PIECE)
    if tl.sum(tl.where(tl.abs(g) <= 3.4e38, 0, 1)) > 0:
        tl.store(found, 1.0)


@triton.jit
def _step(
    base, shadow, table, lr, counter, programs, scale, good, found,
    log_beta1, log_beta2, rest1, rest2, beta1, beta2, eps, decay, highest, lowest, patience,
    ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr, PULLED: tl.constexpr, COPIES: tl.constexpr,
    SCALED: tl.constexpr, CHECKED: tl.constexpr, NONE: tl.constexpr, FIELDS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * FIELDS
    rate = tl.load(lr)
    size, root, factor = rate, 1.0, 1.0
    if ADAM:
        number = (tl.load(counter) + 1).to(tl.float64)
        size = rate / (1.0 - tl.exp(number * log_beta1)).to(tl.float32)
        root = tl.sqrt((1.0 - tl.exp(number * log_beta2)).to(tl.float32))
    if SCALED:
        factor = 1.0 / tl.load(scale)
    shrink = 1.0 - rate * decay
    count = tl.load(row + 4)
    if CHECKED:
        count = tl.where(tl.load(found) != 0.0, 0, count)
    if count == PIECE:
        _update(
            base, shadow, row, PIECE, factor, size, shrink, root, rest1, rest2, beta1, beta2, eps, decay,
            ADAM, DECOUPLED, MOMENTUM, PULLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    elif count > 0:
        _update(
            base, shadow, row, count, factor, size, shrink, root, rest1, rest2, beta1, beta2, eps, decay,
            ADAM, DECOUPLED, MOMENTUM, PULLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    tl.debug_barrier()  # all of this program have read what the last one changes
    if tl.atomic_add(counter + 1, 1) == programs - 1:
        tl.store(counter + 1, 0)
        taken = 1
        if CHECKED:
            taken = _adjust(scale, good, found, highest, lowest, patience)
        tl.store(counter, tl.load(counter) + taken)


@triton.jit
def _adjust(scale, good, found, highest, lowest, patience):
    """Halve the scale after a step that was left out, double it after some that were not; return the steps taken."""
    passed = tl.load(found) == 0.0
    value = tl.load(scale)
    steps = tl.load(good) + 1
    patient = steps == patience
    higher = tl.where(patient, tl.minimum(value * 2.0, highest), value)
    tl.store(scale, tl.where(passed, higher, tl.maximum(value * 0.5, lowest)))
    tl.store(good, tl.where(passed & (steps < patience), steps, 0))
    tl.store(found, 0.0)
    return passed.to(tl.int32)


@triton.jit
def _gradient(base, shadow, row, count, COPIES: tl.constexpr, PIECE: tl.constexpr):
    """Return a piece's gradients in single precision, wherever and however they lie."""
    at = tl.arange(0, PIECE)
    inside = at < count
    gradient = tl.load(row + 5)
    if COPIES:
        if tl.load(row + 6) != 0:
            g = tl.load(shadow + tl.multiple_of(gradient, 8) + at, mask=inside, other=0.0).to(tl.float32)
        else:
            g = tl.load(base + tl.multiple_of(gradient, 4) + at, mask=inside, other=0.0)
    else:
        g = tl.load(base + tl.multiple_of(gradient, 4) + at, mask=inside, other=0.0)
    return g


@triton.jit
def _update(
    base, shadow, row, count, factor, size, shrink, root, rest1, rest2, beta1, beta2, eps, decay,
    ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr, PULLED: tl.constexpr, COPIES: tl.constexpr,
    NONE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Step one piece; where `count` is known to be PIECE, the compiler drops the mask and loads widely."""
    at = tl.arange(0, PIECE)
    inside = at < count
    weights = base + tl.multiple_of(tl.load(row), 4) + at
    w = tl.load(weights, mask=inside, other=0.0)
    g = _gradient(base, shadow, row, count, COPIES, PIECE) * factor
    if PULLED:
        strength = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
        g += strength * (w - tl.load(base + tl.multiple_of(tl.load(row + 7), 4) + at, mask=inside, other=0.0))
    if DECOUPLED:
        w *= shrink
    else:
        g += decay * w
    firsts = base + tl.multiple_of(tl.load(row + 1), 4) + at
    if ADAM:
        seconds = base + tl.multiple_of(tl.load(row + 2), 4) + at
        m = beta1 * tl.load(firsts, mask=inside, other=0.0) + rest1 * g
        v = beta2 * tl.load(seconds, mask=inside, other=0.0) + rest2 * g * g
        tl.store(firsts, m, mask=inside)
        tl.store(seconds, v, mask=inside)
        g = m / (tl.sqrt(v) / root + eps)
    elif MOMENTUM:
        g += beta1 * tl.load(firsts, mask=inside, other=0.0)
        tl.store(firsts, g, mask=inside)
    w -= size * g
    tl.store(weights, w, mask=inside)
    if COPIES:
        copy = tl.load(row + 3)
        if copy != NONE:
            tl.store(shadow + tl.multiple_of(copy, 8) + at, w.to(shadow.dtype.element_ty), mask=inside)


class Fused(torch.optim.Optimizer):
    """Steps tensors that stay where they are, with gradients that may lie anywhere.

    Where a captured step finds its gradients is known when it is captured. The table that says so must lie outside of
    the capture's own memory, which its steps share, so it is made before (`reserve`), and written after (`settle`).
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lr: Tensor,
        moments: int,
        weight_decay: float,
        weights: Weights | None,
        scale: LossScale | None,
    ) -> None:
        super().__init__(tensors, {"lr": lr})
        self.tensors, self.lr, self.weight_decay = list(tensors), lr, weight_decay
        self.weights, self.scale = weights, scale
        self.copies = weights.copies if weights is not None else [None] * len(self.tensors)
        """For each tensor, what is to hold its values in 16 bits."""
        self._shadow = next((copy.detach() for copy in self.copies if copy is not None), None)
        self.moments = torch.zeros((moments, sum(_room(tensor) for tensor in self.tensors)), device=lr.device)
        self.counter = torch.zeros(2, dtype=torch.int32, device=lr.device)
        """Steps taken; programs of the present step that are done."""
        if moments:
            self.state[self.tensors[0]] = {"moments": self.moments, "counter": self.counter}
        self._base = self.moments if moments else self.tensors[0].detach()
        """Everything in single precision is found by its distance from here."""
        self._owner, self._first, self._pieces = self._cut()
        self._reserved: list[Tensor] = []
        self._captured: list[Tensor] = []
        """Tables of captured steps, kept for as long as these may be replayed."""
        self._unwritten: list[tuple[Tensor, Tensor]] = []
        """Of the capture that goes on: tables, and what is to be written into them."""
        self._pulls: tuple[Sequence[Tensor], Sequence[float]] | None = None

    def pull(self, towards: Sequence[Tensor], strengths: Sequence[float]) -> None:
        """Let the next step add strength (tensor - towards) to every gradient."""
        self._pulls = [_aligned(one, tensor) for one, tensor in zip(towards, self.tensors, strict=True)], strengths

    def launch(self, factors: Sequence[float], **kind: bool) -> None:
        """Take a step with the gradients as they lie now."""
        gradients = [_aligned(gradient, tensor) for gradient, tensor in zip(self._given(), self.tensors, strict=True)]
        table = self._table(gradients)
        shadow, copies = (self._base, False) if self._shadow is None else (self._shadow, True)
        scale = self.scale
        states, limits = (self.lr, self.lr, self.lr), (1.0, 1.0, 1)
        if scale is not None:
            states, limits = (scale.value, scale.good, scale.found), (scale.HIGHEST, scale.LOWEST, scale.PATIENCE)
            _look[(len(table),)](self._base, shadow, table, scale.found, COPIES=copies, FIELDS=FIELDS, PIECE=PIECE)
        _step[(len(table),)](
            self._base, shadow, table, self.lr, self.counter, len(table), *states,
            *factors, self.weight_decay, *limits, **kind, PULLED=self._pulls is not None,
            COPIES=copies, SCALED=self.weights is not None and self.weights.scaled, CHECKED=scale is not None,
            NONE=NO_COPY, FIELDS=FIELDS, PIECE=PIECE,
        )  # fmt: skip
        self._pulls = None

    def reserve(self, steps: int) -> None:
        """Make tables for steps that are about to be captured."""
        while len(self._reserved) < steps:
            self._reserved.append(torch.empty(self._pieces.shape, dtype=torch.long, device=self.lr.device))

    def settle(self) -> None:
        """Write the tables of the steps that were captured."""
        for table, rows in self._unwritten:
            table.copy_(rows)
        self._unwritten.clear()

    def _table(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return where everything lies in this step; in a capture, a reserved table that will say so."""
        half = np.array([gradient.dtype.itemsize == 2 for gradient in gradients])
        shadow = self._base if self._shadow is None else self._shadow
        starts = [_distance(g, shadow if g.dtype.itemsize == 2 else self._base) for g in gradients]
        rows = self._pieces.copy()
        rows[:, GRADIENT] = np.array(starts)[self._owner] + self._first
        rows[:, GRADIENT + 1] = half[self._owner]
        if self._pulls is not None:
            towards, strengths = self._pulls
            rows[:, PULL] = np.array([_distance(one, self._base) for one in towards])[self._owner] + self._first
            rows[:, PULL + 1] = np.array(strengths, dtype=np.float32).view(np.int32)[self._owner]
        if not (self.lr.is_cuda and torch.cuda.is_current_stream_capturing()):
            return torch.from_numpy(rows).to(self.lr.device)
        table = self._reserved.pop()
        self._captured.append(table)
        self._unwritten.append((table, torch.from_numpy(rows)))
        return table

    def _given(self) -> list[Tensor]:
        """Return every tensor's gradient, and zeros where it has none."""
        raw_gradients = (
            self.weights.raw_gradients if self.weights is not None else [tensor.grad for tensor in self.tensors]
        )
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for gradient, tensor in zip(raw_gradients, self.tensors, strict=True)
        ]

    def _cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for every piece its tensor, its first value in it, and its row of the table as far as it stays."""
        owners, firsts, rows, start = [], [], [], 0
        size = self.moments.shape[1]
        for number, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
            assert copy is None or copy.stride() == tensor.stride()
            for first in range(0, tensor.numel(), PIECE):
                to = NO_COPY if copy is None or self._shadow is None else _distance(copy, self._shadow) + first
                moments = (start + first, size + start + first)
                count = min(PIECE, tensor.numel() - first)
                owners.append(number)
                firsts.append(first)
                rows.append((_distance(tensor, self._base) + first, *moments, to, count, 0, 0, 0, 0))
            start += _room(tensor)
        return np.array(owners), np.array(firsts), np.array(rows, dtype=np.int64)


class FusedAdam(Fused):
    """torch.optim.Adam, or AdamW where weight decay is decoupled."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lr: Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        weights: Weights | None = None,
        scale: LossScale | None = None,
        *,
        decoupled: bool,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(tensors, lr, 2, weight_decay, weights, scale)
        self.betas, self.decoupled, self.eps = betas, decoupled, eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        beta1, beta2 = self.betas
        factors = (_log(beta1), _log(beta2), 1 - beta1, 1 - beta2, beta1, beta2, self.eps)
        self.launch(factors, ADAM=True, DECOUPLED=self.decoupled, MOMENTUM=False)


class FusedSGD(Fused):
    """torch.optim.SGD."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        lr: Tensor,
        momentum: float,
        weight_decay: float,
        weights: Weights | None = None,
        scale: LossScale | None = None,
    ) -> None:
        super().__init__(tensors, lr, int(momentum > 0), weight_decay, weights, scale)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        factors = (0.0, 0.0, 0.0, 0.0, self.momentum, 0.0, 0.0)
        self.launch(factors, ADAM=False, DECOUPLED=False, MOMENTUM=self.momentum > 0)


def _aligned(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Return a gradient that lies as its tensor does, from an address that wide loads take."""
    if gradient.data_ptr() % 16 == 0 and _steps(gradient) == _steps(tensor):
        return gradient
    return torch.empty_like(tensor, dtype=gradient.dtype).copy_(gradient)


def _steps(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _distance(tensor: Tensor, base: Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def _room(tensor: Tensor) -> int:
    """Return a tensor's values, rounded up so that the next one's moments begin at an aligned address."""
    return -(-tensor.numel() // 4) * 4


def _log(beta: float) -> float:
    return math.log(max(beta, 1e-30))
