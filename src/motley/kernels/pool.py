"""Max pooling over 3x3 windows of stride 2. One byte per window records where its maximum was.

Of equal values the first counts, as in torch. As with norms (`kernels/norm.py`), the result is
returned twice, for two uses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motley.kernels import LENGTHS, twin
from motley.kernels.compiling import launch

#: Values that one program computes.
TILE = 2048


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    x, y, where, rows, height, width, P, Q, channels,
    KEEP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = (row < rows)[:, None] & (channel < channels)[None, :]
    n, i, j = row // (P * Q), row // Q % P, row % Q
    best = tl.full((ROWS, CHANNELS), float("-inf"), tl.float32)
    tap = tl.zeros((ROWS, CHANNELS), tl.int8)
    for t in tl.static_range(9):
        a, b = 2 * i + t // 3 - 1, 2 * j + t % 3 - 1
        inside = (a >= 0) & (a < height) & (b >= 0) & (b < width)
        at = ((n * height + a) * width + b)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=known & inside[:, None], other=float("-inf")).to(tl.float32)
        larger = (value > best) | (value != value)  # NaN counts as largest, as in torch
        best = tl.where(larger, value, best)
        tap = tl.where(larger, t, tap).to(tl.int8)
    at = row[:, None] * channels + channel[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=known)
    if KEEP:
        tl.store(where + at, tap, mask=known)


@triton.jit(do_not_specialize=LENGTHS)
def _backward(
    dy, twin, where, dx, rows, height, width, P, Q, channels,
    TWIN: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Give each input value the gradients of the windows, four at most, whose maximum it is."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = (row < rows)[:, None] & (channel < channels)[None, :]
    n, i, j = row // (height * width), row // width % height, row % width
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for t in tl.static_range(4):
        a, b = (i + t // 2) // 2, (j + t % 2) // 2
        # An even position is in one window per dimension, an odd one in two.
        again = (i % 2 < t // 2) | (j % 2 < t % 2)
        met = known & ((a < P) & (b < Q) & ~again)[:, None]
        at = ((n * P + a) * Q + b)[:, None] * channels + channel[None, :]
        tap = (i - 2 * a + 1) * 3 + (j - 2 * b + 1)
        mine = met & (tl.load(where + at, mask=met, other=-1) == tap[:, None])
        total += tl.load(dy + at, mask=mine, other=0.0).to(tl.float32)
        if TWIN:
            total += tl.load(twin + at, mask=mine, other=0.0).to(tl.float32)
    tl.store(
        dx + row[:, None] * channels + channel[None, :], total.to(dx.dtype.element_ty), mask=known
    )


def _grid(rows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    width = min(triton.next_power_of_2(channels), 64)
    tile = {"ROWS": TILE // width, "CHANNELS": width}
    return (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(channels, width)), tile


def _pooled(x: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    count, channels, height, width = x.shape
    shape = (count, channels, (height + 1) // 2, (width + 1) // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    where = torch.empty_like(y, dtype=torch.int8) if keep else y
    rows = y.numel() // channels
    grid, tile = _grid(rows, channels)
    launch(
        _forward,
        grid,
        x,
        y,
        where,
        rows,
        height,
        width,
        shape[2],
        shape[3],
        channels,
        KEEP=keep,
        **tile,
    )
    return y, where


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, where = _pooled(x, keep=True)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return y, twin(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor:
        (where,) = ctx.saved_tensors
        given = [
            g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None
        ]
        _, channels, height, width = ctx.shape
        kind = {
            "dtype": given[0].dtype,
            "device": where.device,
            "memory_format": torch.channels_last,
        }
        dx = torch.empty(ctx.shape, **kind)
        rows = dx.numel() // channels
        grid, tile = _grid(rows, channels)
        launch(_backward, grid,
            given[0], given[-1], where, dx, rows, height, width,
            where.shape[2], where.shape[3], channels,
            TWIN=len(given) == 2, **tile,
        )  # fmt: skip
        return dx


def applies(x: Tensor, pool: nn.MaxPool2d) -> bool:
    """Tell whether a map is in channels-last format, with the windows of a ResNet's stem."""
    windows = (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == (3, 2, 1, 1)
    return windows and not pool.ceil_mode and x.is_contiguous(memory_format=torch.channels_last)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima, twice for two uses."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        y, _ = _pooled(x, keep=False)
        return y, y
    result: tuple[Tensor, Tensor] = _MaxPool.apply(x)
    return result
