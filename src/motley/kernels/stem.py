"""The first convolution of a network: few input channels, no gradient for the images.

In channels-last format the values under one row of taps are contiguous in memory: 7 taps of 3
channels are 21 consecutive numbers. The convolution is therefore one small matrix product per row
of taps, whereas cuDNN first pads the channels to eight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from motley.kernels import LENGTHS, compiled_in
from motley.kernels.compiling import launch
from motley.kernels.convolve import matches, output_side

#: The largest number of values in a row of taps.
MOST_INNER = 64
#: Inputs and outputs must have fewer values than this: places in them are 32-bit numbers.
MOST_VALUES = 2**31
#: Output channels per program.
OUTPUTS = 64
#: Output positions that a program processes at a time.
ROWS = 128
#: Number of blocks of positions whose gradients are summed separately.
BLOCKS = 16


@triton.jit
def _taps(x, p, rows, r, P, Q, H, LINE, STRIDE, PAD, CHANNELS, TAPS, j):
    """Return the inputs under the r-th row of taps at each output position: (positions, values)."""
    n = p // (P * Q)
    i = (p // Q) % P * STRIDE + r - PAD
    column = ((p % Q) * STRIDE - PAD)[:, None] * CHANNELS + j[None, :]
    met = (
        ((p < rows) & (i >= 0) & (i < H))[:, None]
        & (j < TAPS)[None, :]
        & (column >= 0)
        & (column < LINE)
    )
    return tl.load(x + (n * H + i)[:, None] * LINE + column, mask=met, other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    x, weight, y, rows, outputs, P, Q, H, LINE, STRIDE, PAD, CHANNELS, TAPS,
    HEIGHT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    j = tl.arange(0, INNER)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for r in range(HEIGHT):
        met = _taps(x, p, rows, r, P, Q, H, LINE, STRIDE, PAD, CHANNELS, TAPS, j)
        at = weight + k[None, :] * (HEIGHT * TAPS) + r * TAPS + j[:, None]
        taps = tl.load(at, mask=(k < outputs)[None, :] & (j < TAPS)[:, None], other=0.0)
        total = tl.dot(met, taps, total, input_precision=PRECISION)
    inside = (p < rows)[:, None] & (k < outputs)[None, :]
    tl.store(
        y + p.to(tl.int64)[:, None] * outputs + k[None, :],
        total.to(y.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=LENGTHS)
def _gradient(
    x, dy, sums, span, rows, outputs, P, Q, H, LINE, STRIDE, PAD, CHANNELS, TAPS,
    HEIGHT: tl.constexpr, SPAN: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row of taps, summed over a block of positions.

    It is stored in sums[block, output, row, tap].
    """
    block, r = tl.program_id(0), tl.program_id(1)
    k = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    j = tl.arange(0, INNER)
    total = tl.zeros((OUTPUTS, INNER), tl.float32)
    length = SPAN if SPAN > 0 else span
    for start in range(0, length, ROWS):
        p = block * length + start + tl.arange(0, ROWS)
        met = _taps(x, p, rows, r, P, Q, H, LINE, STRIDE, PAD, CHANNELS, TAPS, j)
        inside = (p < rows)[:, None] & (k < outputs)[None, :]
        g = tl.load(dy + p[:, None] * outputs + k[None, :], mask=inside, other=0.0)
        total = tl.dot(tl.trans(g), met, total, input_precision=PRECISION)
    at = ((block * outputs + k)[:, None] * HEIGHT + r) * TAPS + j[None, :]
    tl.store(sums + at, total, mask=(k < outputs)[:, None] & (j < TAPS)[None, :])


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        outputs, channels, height, width = weight.shape
        sides = [
            output_side(side, taps, stride, padding)
            for side, taps in zip(x.shape[2:], (height, width), strict=True)
        ]
        shape = (len(x), outputs, *sides)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.shape = (
            len(x) * sides[0] * sides[1], outputs, *sides, x.shape[2], x.shape[3] * channels,
            stride, padding, channels, width * channels,
        )  # fmt: skip
        ctx.kind = {
            "HEIGHT": height,
            "INNER": max(triton.next_power_of_2(width * channels), 16),
            "OUTPUTS": OUTPUTS,
            "PRECISION": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        }
        grid = triton.cdiv(ctx.shape[0], ROWS), triton.cdiv(outputs, OUTPUTS)
        launch(_forward, grid, x, weight, y, *ctx.shape, **ctx.kind, ROWS=ROWS, num_warps=4)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        outputs, channels, height, width = weight.shape
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        rows = ctx.shape[0]
        span = triton.cdiv(rows, BLOCKS * ROWS) * ROWS
        blocks = triton.cdiv(rows, span)
        sums = torch.empty((blocks, outputs, height, width, channels), device=x.device)
        launch(
            _gradient,
            (blocks, height, triton.cdiv(outputs, OUTPUTS)),
            x,
            dy,
            sums,
            span,
            *ctx.shape,
            SPAN=compiled_in(len(x), span),
            **ctx.kind,
            ROWS=ROWS,
            num_warps=4,
        )
        return None, sums.sum(0).to(weight.dtype).permute(0, 3, 1, 2), None, None


def applies(x: Tensor, convolution: torch.nn.Conv2d) -> bool:
    """Tell whether the kernel can be used.

    Images must be in channels-last format and need no gradient, and rows of taps must be short.
    Images that are smaller than the taps are left to torch, which says so.
    """
    taps = convolution.kernel_size[1] * convolution.in_channels
    square = len({*convolution.stride}) == 1 and len({*convolution.padding}) == 1
    plain = (
        convolution.bias is None
        and convolution.groups == 1
        and convolution.dilation == (1, 1)
        and square
    )
    if not plain or taps > MOST_INNER or x.requires_grad or not matches(x, convolution.weight):
        return False
    stride, padding = convolution.stride[0], int(convolution.padding[0])
    values = len(x) * convolution.out_channels
    for side, length in zip(x.shape[2:], convolution.kernel_size, strict=True):
        positions = output_side(side, length, stride, padding)
        if positions < 1:
            return False
        values *= positions
    return max(values, x.numel()) < MOST_VALUES


def convolve(x: Tensor, convolution: torch.nn.Conv2d) -> Tensor:
    """Apply a convolution to images."""
    stride, padding = convolution.stride[0], convolution.padding[0]
    result: Tensor = _Stem.apply(x, convolution.weight, stride, padding)
    return result
