"""Adam and SGD in one kernel over all tensors.

torch's multi-tensor optimizers divide the work into pieces of 65,536 values; for a small model
these are too few to fill a large GPU. Here a table on the device holds the addresses of all pieces,
so a step is a single launch with many small pieces. The result is that of torch.optim's Adam, AdamW
and SGD.

If there are 16-bit copies of the weights, the kernel reads their gradients as backward wrote them,
divides by the loss scale, and writes the new copies in the same pass: no value goes through memory
twice. A proximal term, which pulls the weights towards other weights, is one more value to read.

With a loss scale, a first kernel checks the gradients. If any is not finite, the step is skipped
and the scale is halved (`LossScale`).
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

from motley.core.async_copy import to_device
from motley.kernels.compiling import launch


class LossScale(Protocol):
    """The factor on the loss in fp16, on the device (`motley.client.weights.LossScale`)."""

    HIGHEST: float
    LOWEST: float
    PATIENCE: int
    value: Tensor
    good: Tensor
    found_inf: Tensor


class Weights(Protocol):
    """16-bit copies and gradients of the trained tensors (`motley.client.weights.Weights`)."""

    copies: list[Tensor | None]
    scaled: bool

    @property
    def raw_gradients(self) -> list[Tensor | None]:
        """The gradients as backward wrote them."""
        ...


#: Values that one program updates.
PIECE = 4096
#: Warps of a program that updates. With 4, which is Triton's default, each thread has 32 values of
#: the weight, the gradient and both moments: more than its 255 registers hold.
WARPS = 8
#: Number of columns of the table, which has one row per piece. Positions are offsets in elements.
#: 0 to 3: position of the weight, the first moment, the second moment, and the 16-bit copy;
#: 4: number of values;
#: 5, 6: position of the gradient, and whether it has 16 bits;
#: 7, 8: position of the target of the proximal term, and its strength as the bits of a float.
FIELDS = 9
#: The first columns of the gradient and of the proximal term, which change from step to step.
GRADIENT, PULL = 5, 7
#: Marks tensors without a 16-bit copy in column 3.
NO_COPY = -(2**62)


@triton.jit
def _look(
    base, shadow, table, found, COPIES: tl.constexpr, FIELDS: tl.constexpr, PIECE: tl.constexpr
):
    """Set `found` to 1 if any gradient is not finite."""
    row = table + tl.program_id(0) * FIELDS
    count = tl.load(row + 4)
    if count == PIECE:
        g = _gradient(base, shadow, row, PIECE, COPIES, PIECE)
    else:
        g = _gradient(base, shadow, row, count, COPIES, PIECE)
    if tl.sum(tl.where(tl.abs(g) <= 3.4e38, 0, 1)) > 0:
        tl.store(found, 1.0)


# Without this, models with a multiple of 16 pieces would need a kernel of their own.
@triton.jit(do_not_specialize=["programs"])
def _step(
    base, shadow, table, lr, counter, programs, scale, good, found,
    log_beta1, log_beta2, rest1, rest2, beta1, beta2, eps, decay, highest, lowest, patience,
    ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr, PULLED: tl.constexpr,
    COPIES: tl.constexpr, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    NONE: tl.constexpr, FIELDS: tl.constexpr, PIECE: tl.constexpr,
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
            base, shadow, row, PIECE, factor, size, shrink, root,
            rest1, rest2, beta1, beta2, eps, decay,
            ADAM, DECOUPLED, MOMENTUM, PULLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    elif count > 0:
        _update(
            base, shadow, row, count, factor, size, shrink, root,
            rest1, rest2, beta1, beta2, eps, decay,
            ADAM, DECOUPLED, MOMENTUM, PULLED, COPIES, NONE, PIECE,
        )  # fmt: skip
    # All threads of this program must have read the counter, the scale and `found` before the last
    # program to finish changes them.
    tl.debug_barrier()
    if tl.atomic_add(counter + 1, 1) == programs - 1:
        tl.store(counter + 1, 0)
        taken = 1
        if CHECKED:
            taken = _adjust(scale, good, found, highest, lowest, patience)
        tl.store(counter, tl.load(counter) + taken)


@triton.jit
def _adjust(scale, good, found, highest, lowest, patience):
    """Halve the loss scale after a skipped step; double it after `patience` steps in a row.

    Return 1 if the step was taken and 0 if it was skipped.
    """
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
    """Return a piece's gradients in single precision."""
    at = tl.arange(0, PIECE)
    inside = at < count
    gradient = tl.load(row + 5)
    if COPIES:
        if tl.load(row + 6) != 0:
            g = tl.load(shadow + tl.multiple_of(gradient, 8) + at, mask=inside, other=0.0).to(
                tl.float32
            )
        else:
            g = tl.load(base + tl.multiple_of(gradient, 4) + at, mask=inside, other=0.0)
    else:
        g = tl.load(base + tl.multiple_of(gradient, 4) + at, mask=inside, other=0.0)
    return g


@triton.jit
def _update(
    base, shadow, row, count, factor, size, shrink, root, rest1, rest2, beta1, beta2, eps, decay,
    ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr, PULLED: tl.constexpr,
    COPIES: tl.constexpr, NONE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Update one piece.

    If `count` is the constant PIECE, the compiler drops the mask and uses vectorized loads.
    """
    at = tl.arange(0, PIECE)
    inside = at < count
    weights = base + tl.multiple_of(tl.load(row), 4) + at
    w = tl.load(weights, mask=inside, other=0.0)
    g = _gradient(base, shadow, row, count, COPIES, PIECE) * factor
    if PULLED:
        strength = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
        g += strength * (
            w - tl.load(base + tl.multiple_of(tl.load(row + 7), 4) + at, mask=inside, other=0.0)
        )
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
            tl.store(
                shadow + tl.multiple_of(copy, 8) + at, w.to(shadow.dtype.element_ty), mask=inside
            )


class Fused(torch.optim.Optimizer):
    """An optimizer of tensors with fixed addresses; their gradients may be anywhere.

    The addresses of a captured step's gradients are only known while it is captured. The table that
    holds them must not be in the memory pool of the capture, which its steps share. Therefore it is
    allocated before the capture (`reserve`) and written after it (`settle`).
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
        #: The 16-bit copy of each tensor, or None.
        self.copies = weights.copies if weights is not None else [None] * len(self.tensors)
        self._shadow = next((copy.detach() for copy in self.copies if copy is not None), None)
        self.moments = torch.zeros(
            (moments, sum(_room(tensor) for tensor in self.tensors)), device=lr.device
        )
        #: The number of steps taken, and of programs that have finished the current step.
        self.counter = torch.zeros(2, dtype=torch.int32, device=lr.device)
        if moments:
            self.state[self.tensors[0]] = {"moments": self.moments, "counter": self.counter}
        #: Positions of all tensors in single precision are offsets from this one.
        self._base = self.moments if moments else self.tensors[0].detach()
        self._owner, self._first, self._pieces = self._cut()
        self._reserved: list[Tensor] = []
        #: Tables of captured steps, kept as long as the steps may be replayed.
        self._captured: list[Tensor] = []
        #: Tables of the current capture, each with the rows to be written to it afterwards.
        self._unwritten: list[tuple[Tensor, Tensor]] = []
        self._pulls: tuple[Sequence[Tensor], Sequence[float]] | None = None

    def pull(self, towards: Sequence[Tensor], strengths: Sequence[float]) -> None:
        """Add strength * (tensor - towards) to every gradient in the next step."""
        self._pulls = (
            [_aligned(one, tensor) for one, tensor in zip(towards, self.tensors, strict=True)],
            strengths,
        )

    def launch(self, factors: Sequence[float], **kind: bool) -> None:
        """Take a step with the current gradients."""
        gradients = [
            _aligned(gradient, tensor)
            for gradient, tensor in zip(self._given(), self.tensors, strict=True)
        ]
        table = self._table(gradients)
        shadow, copies = (self._base, False) if self._shadow is None else (self._shadow, True)
        scale = self.scale
        states, limits = (self.lr, self.lr, self.lr), (1.0, 1.0, 1)
        if scale is not None:
            found_inf = scale.found_inf
            states, limits = (
                (scale.value, scale.good, found_inf),
                (scale.HIGHEST, scale.LOWEST, scale.PATIENCE),
            )
            launch(
                _look,
                (len(table),),
                self._base,
                shadow,
                table,
                found_inf,
                COPIES=copies,
                FIELDS=FIELDS,
                PIECE=PIECE,
            )
        launch(_step, (len(table),),
            self._base, shadow, table, self.lr, self.counter, len(table), *states,
            *factors, self.weight_decay, *limits, **kind, PULLED=self._pulls is not None,
            COPIES=copies, SCALED=self.weights is not None and self.weights.scaled,
            CHECKED=scale is not None, NONE=NO_COPY, FIELDS=FIELDS, PIECE=PIECE,
            num_warps=WARPS,
        )  # fmt: skip
        self._pulls = None

    def reserve(self, steps: int) -> None:
        """Allocate tables for steps that are about to be captured."""
        while len(self._reserved) < steps:
            self._reserved.append(
                torch.empty(self._pieces.shape, dtype=torch.long, device=self.lr.device)
            )

    def settle(self) -> None:
        """Write the tables of the captured steps."""
        for table, rows in self._unwritten:
            table.copy_(rows)
        self._unwritten.clear()

    def _table(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the table of this step. During a capture it is a reserved one, written later."""
        half = np.array([gradient.dtype.itemsize == 2 for gradient in gradients])
        shadow = self._base if self._shadow is None else self._shadow
        starts = [_distance(g, shadow if g.dtype.itemsize == 2 else self._base) for g in gradients]
        rows = self._pieces.copy()
        rows[:, GRADIENT] = np.array(starts)[self._owner] + self._first
        rows[:, GRADIENT + 1] = half[self._owner]
        if self._pulls is not None:
            towards, strengths = self._pulls
            rows[:, PULL] = (
                np.array([_distance(one, self._base) for one in towards])[self._owner] + self._first
            )
            rows[:, PULL + 1] = np.array(strengths, dtype=np.float32).view(np.int32)[self._owner]
        if not (self.lr.is_cuda and torch.cuda.is_current_stream_capturing()):
            return to_device(torch.from_numpy(rows), self.lr.device)
        table = self._reserved.pop()
        self._captured.append(table)
        self._unwritten.append((table, torch.from_numpy(rows)))
        return table

    def _given(self) -> list[Tensor]:
        """Return the gradient of every tensor, or zeros if it has none."""
        raw_gradients = (
            self.weights.raw_gradients
            if self.weights is not None
            else [tensor.grad for tensor in self.tensors]
        )
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for gradient, tensor in zip(raw_gradients, self.tensors, strict=True)
        ]

    def _cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three arrays with one entry per piece.

        They are the number of its tensor, the position of its first value in that tensor, and its
        row of the table; the columns that change with each step are zero.
        """
        owners, firsts, rows, start = [], [], [], 0
        size = self.moments.shape[1]
        for number, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
            assert copy is None or copy.stride() == tensor.stride()
            for first in range(0, tensor.numel(), PIECE):
                to = (
                    NO_COPY
                    if copy is None or self._shadow is None
                    else _distance(copy, self._shadow) + first
                )
                moments = (start + first, size + start + first)
                count = min(PIECE, tensor.numel() - first)
                owners.append(number)
                firsts.append(first)
                rows.append(
                    (_distance(tensor, self._base) + first, *moments, to, count, 0, 0, 0, 0)
                )
            start += _room(tensor)
        return np.array(owners), np.array(firsts), np.array(rows, dtype=np.int64)


class FusedAdam(Fused):
    """torch.optim.Adam, or AdamW if weight decay is decoupled."""

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
    """Return the gradient in its tensor's memory layout, at an address aligned to 16 bytes.

    It is copied if necessary. Vectorized loads need the alignment.
    """
    if gradient.data_ptr() % 16 == 0 and _steps(gradient) == _steps(tensor):
        return gradient
    return torch.empty_like(tensor, dtype=gradient.dtype).copy_(gradient)


def _steps(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _distance(tensor: Tensor, base: Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def _room(tensor: Tensor) -> int:
    """Return the tensor's size, rounded up so that the next tensor's moments start aligned."""
    return -(-tensor.numel() // 4) * 4


def _log(beta: float) -> float:
    return math.log(max(beta, 1e-30))
