"""Kernels for relu(batch_norm(x) + add): forward, backward, and evaluation.

A map with few rows (examples x map positions) takes one kernel: each program reads all rows of a
few channels into registers once, computes mean and variance, writes the result and updates the
running statistics. A map with many rows takes two kernels: the first writes sums over blocks of
rows; the second adds them up, always in the same order, and applies the result. The sums are taken
over differences to the channel's first value, so that a large mean costs no precision.

With g = dy where y > 0, xhat = (x - mean) / std and n rows:

    dbias = sum g,   dweight = sum g xhat,   dadd = g
    dx = weight / std * (g - dbias / n - xhat dweight / n)

The result is returned as two tensors that share memory, because a residual block uses its input
twice: the gradients of both uses arrive here separately and are added inside the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motley.kernels import LENGTHS, compiled_in, twin
from motley.kernels.compiling import launch

#: The largest number of rows that one program holds in registers.
FEW_ROWS = 1024


@triton.jit
def _relu(x):
    """Keep NaN, as torch does: a diverged model must not look like one whose outputs are zero."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _moments(first, total, squares, rows, eps):
    """Return mean, variance and 1 / std from sums of differences to the value `first`."""
    off = total / rows
    variance = tl.maximum(squares / rows - off * off, 0.0)
    return first + off, variance, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _moved(old_mean, old_var, m, variance, rows, momentum):
    """Return the running statistics after one more batch."""
    unbiased = variance * (rows / (rows - 1.0))
    return old_mean + momentum * (m - old_mean), old_var + momentum * (unbiased - old_var)


@triton.jit
def _gradient(
    dy, twin, y, at, inside, off, scale, shift,
    TWIN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Return g; `off` is x - mean. Without `add`, y's sign follows from x and y is not read."""
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if TWIN:
        g += tl.load(twin + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if ADD:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
        else:
            g = tl.where(off * scale[None, :] + shift[None, :] > 0, g, 0.0)
    return g


@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    x, add, weight, bias, y, mean, rstd, running_mean, running_var, tracked,
    rows, channels, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    inside = (row < rows) & known[None, :]
    at = row * channels + channel[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    off = tl.where(inside, values - first[None, :], 0.0)
    total, squares = tl.reduce((off, off * off), 0, _pairs)
    m, variance, r = _moments(first, total, squares, rows, eps)
    out = (values - m[None, :]) * (r * w)[None, :] + b[None, :]
    if ADD:
        out += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        out = _relu(out)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + channel, m, mask=known)
    tl.store(rstd + channel, r, mask=known)
    run_mean = tl.load(running_mean + channel, mask=known, other=0.0)
    run_var = tl.load(running_var + channel, mask=known, other=0.0)
    run_mean, run_var = _moved(run_mean, run_var, m, variance, rows, momentum)
    tl.store(running_mean + channel, run_mean, mask=known)
    tl.store(running_var + channel, run_var, mask=known)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=LENGTHS)
def _backward(
    dy, twin, x, y, weight, bias, mean, rstd, dx, dadd, dweight, dbias,
    rows, channels,
    TWIN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    inside = (row < rows) & known[None, :]
    at = row * channels + channel[None, :]
    m = tl.load(mean + channel, mask=known, other=0.0)
    r = tl.load(rstd + channel, mask=known, other=0.0)
    off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]
    g = _gradient(dy, twin, y, at, inside, off, r * w, b, TWIN, ADD, RELU)
    if ADD:
        tl.store(dadd + at, g.to(dadd.dtype.element_ty), mask=inside)
    xhat = off * r[None, :]
    sum_g, sum_gx = tl.reduce((g, g * xhat), 0, _pairs)
    out = (g - (sum_g / rows)[None, :] - xhat * (sum_gx / rows)[None, :]) * (r * w)[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    tl.store(dbias + channel, sum_g, mask=known)
    tl.store(dweight + channel, sum_gx, mask=known)


@triton.jit(do_not_specialize=LENGTHS)
def _block_moments(
    x, sums, rows, span, channels, SPAN: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Write the sums over a block of rows to sums[block, 0 and 1, channel]."""
    block = tl.program_id(0)
    length = SPAN if SPAN > 0 else span
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    first = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, length, ROWS):
        row = block * length + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - first[None, :]
        off = tl.where(inside, off, 0.0)
        total += off
        squares += off * off
    into = sums + block * 2 * channels + channel
    tl.store(into, tl.sum(total, 0), mask=known)
    tl.store(into + channels, tl.sum(squares, 0), mask=known)


@triton.jit(do_not_specialize=LENGTHS)
def _block_gradients(
    dy, twin, x, y, weight, bias, mean, rstd, sums, rows, span, channels,
    TWIN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    length = SPAN if SPAN > 0 else span
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    m = tl.load(mean + channel, mask=known, other=0.0)
    r = tl.load(rstd + channel, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    products = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, length, ROWS):
        row = block * length + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]
        g = _gradient(dy, twin, y, at, inside, off, r * w, b, TWIN, ADD, RELU)
        total += g
        products += g * off
    into = sums + block * 2 * channels + channel
    tl.store(into, tl.sum(total, 0), mask=known)
    tl.store(into + channels, tl.sum(products, 0) * r, mask=known)


@triton.jit
def _all_blocks(sums, channel, known, channels, blocks, BLOCKS: tl.constexpr):
    """Return both sums over all blocks."""
    block = tl.arange(0, BLOCKS)[:, None]
    at = sums + block * 2 * channels + channel[None, :]
    inside = (block < blocks) & known[None, :]
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + channels, mask=inside, other=0.0)
    return tl.reduce((first, second), 0, _pairs)


@triton.jit(do_not_specialize=LENGTHS)
def _apply_forward(
    x, add, weight, bias, y, mean, rstd, running_mean, running_var, tracked, sums,
    rows, span, blocks, channels, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    length = SPAN if SPAN > 0 else span
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    first = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    total, squares = _all_blocks(sums, channel, known, channels, blocks, BLOCKS)
    m, variance, r = _moments(first, total, squares, rows, eps)
    scale = r * tl.load(weight + channel, mask=known, other=0.0)
    shift = tl.load(bias + channel, mask=known, other=0.0)
    for start in range(0, length, ROWS):
        row = tl.program_id(0) * length + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        out = (values - m[None, :]) * scale[None, :] + shift[None, :]
        if ADD:
            out += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            out = _relu(out)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(mean + channel, m, mask=known)
        tl.store(rstd + channel, r, mask=known)
        run_mean = tl.load(running_mean + channel, mask=known, other=0.0)
        run_var = tl.load(running_var + channel, mask=known, other=0.0)
        run_mean, run_var = _moved(run_mean, run_var, m, variance, rows, momentum)
        tl.store(running_mean + channel, run_mean, mask=known)
        tl.store(running_var + channel, run_var, mask=known)
        if tl.program_id(1) == 0:
            tl.store(tracked, tl.load(tracked) + 1)


@triton.jit(do_not_specialize=LENGTHS)
def _apply_backward(
    dy, twin, x, y, weight, bias, mean, rstd, dx, dadd, dweight, dbias, sums,
    rows, span, blocks, channels,
    TWIN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    length = SPAN if SPAN > 0 else span
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    sum_g, sum_gx = _all_blocks(sums, channel, known, channels, blocks, BLOCKS)
    m = tl.load(mean + channel, mask=known, other=0.0)
    r = tl.load(rstd + channel, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    for start in range(0, length, ROWS):
        row = tl.program_id(0) * length + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]
        g = _gradient(dy, twin, y, at, inside, off, r * w, b, TWIN, ADD, RELU)
        if ADD:
            tl.store(dadd + at, g.to(dadd.dtype.element_ty), mask=inside)
        xhat = off * r[None, :]
        out = (g - (sum_g / rows)[None, :] - xhat * (sum_gx / rows)[None, :]) * (r * w)[None, :]
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(dbias + channel, sum_g, mask=known)
        tl.store(dweight + channel, sum_gx, mask=known)


@triton.jit
def _scale(
    x, add, weight, bias, mean, variance, y, total, channels, eps,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel = at % channels
    scale = tl.load(weight + channel) / tl.sqrt(tl.load(variance + channel) + eps)
    shift = tl.load(bias + channel) - tl.load(mean + channel) * scale
    out = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale + shift
    if ADD:
        out += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        out = _relu(out)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def applies(x: Tensor, training: bool) -> bool:
    """Tell whether the kernels can be used for a map, which must be in channels-last format.

    Training needs at least two rows, and the evaluation kernel computes no gradient.
    """
    enough = x.numel() > x.shape[1] if training else not torch.is_grad_enabled()
    return enough and x.is_contiguous(memory_format=torch.channels_last)


def few(rows: int, channels: int) -> dict[str, int]:
    """Return the tile and number of warps of a program that holds all rows.

    Tiles have few channels: many small programs are fastest.
    """
    height = max(triton.next_power_of_2(rows), 16)
    width = min(4, triton.next_power_of_2(channels))
    return {"ROWS": height, "CHANNELS": width, "num_warps": max(1, min(height * width // 256, 8))}


class Tall(NamedTuple):
    """How the work on a map with many rows is divided among programs."""

    tile: dict[str, int]
    #: Programs along the rows in the summing kernel.
    blocks: int
    #: Programs along the channels.
    sides: int
    #: Rows per program in the summing kernel.
    summed: int
    #: Rows per program in the applying kernel.
    applied: int
    #: A power of two that is at least `blocks`.
    most: int


def many(x: Tensor) -> Tall:
    """Divide the work on a map among programs."""
    channels = x.shape[1]
    rows = x.numel() // channels
    width = min(triton.next_power_of_2(channels), 64)
    values, summing, applying = (2048, 64, 128) if rows * channels <= 2**21 else (4096, 128, 256)
    height, sides = values // width, triton.cdiv(channels, width)
    summed, applied = (
        _span(rows, height, max(programs // sides, 1)) for programs in (summing, applying)
    )
    blocks = triton.cdiv(rows, summed)
    most = triton.next_power_of_2(compiled_in(len(x), blocks) or max(summing // sides, 1))
    return Tall(
        {"ROWS": height, "CHANNELS": width, "num_warps": 8}, blocks, sides, summed, applied, most
    )


def _span(rows: int, height: int, programs: int) -> int:
    """Return the rows per program, in whole tiles, such that at most `programs` are needed."""
    return triton.cdiv(triton.cdiv(rows, programs), height) * height


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        add: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: Any,
        relu: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        channels = x.shape[1]
        rows = x.numel() // channels
        y = torch.empty_like(x)
        mean, rstd = weight.new_empty(channels), weight.new_empty(channels)
        if add is not None:
            add = add.contiguous(memory_format=torch.channels_last)
        tensors = (
            x, x if add is None else add, weight, bias, y, mean, rstd,
            norm.running_mean, norm.running_var, norm.num_batches_tracked,
        )  # fmt: skip
        kind = {"ADD": add is not None, "RELU": relu}
        if rows <= FEW_ROWS:
            tile = few(rows, channels)
            grid: tuple[int, ...] = (triton.cdiv(channels, tile["CHANNELS"]),)
            launch(
                _forward, grid, *tensors, rows, channels, norm.eps, norm.momentum, **kind, **tile
            )
        else:
            tall = many(x)
            sums = weight.new_empty((tall.blocks, 2, channels))
            launch(
                _block_moments,
                (tall.blocks, tall.sides),
                x,
                sums,
                rows,
                tall.summed,
                channels,
                SPAN=compiled_in(len(x), tall.summed),
                **tall.tile,
            )
            launch(_apply_forward, (triton.cdiv(rows, tall.applied), tall.sides),
                *tensors, sums, rows, tall.applied, tall.blocks, channels, norm.eps, norm.momentum,
                SPAN=compiled_in(len(x), tall.applied), BLOCKS=tall.most, **kind, **tall.tile,
            )  # fmt: skip
        ctx.save_for_backward(x, y, weight, bias, mean, rstd)
        ctx.add, ctx.relu = add is not None, relu
        return y, twin(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        given = [
            g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None
        ]
        channels = x.shape[1]
        rows = x.numel() // channels
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        dadd = torch.empty_like(x) if ctx.add else dx
        entered = (given[0], given[-1], x, y, weight, bias, mean, rstd)
        left = (dx, dadd, dweight, dbias)
        kind = {"TWIN": len(given) == 2, "ADD": ctx.add, "RELU": ctx.relu}
        if rows <= FEW_ROWS:
            tile = few(rows, channels)
            grid: tuple[int, ...] = (triton.cdiv(channels, tile["CHANNELS"]),)
            launch(_backward, grid, *entered, *left, rows, channels, **kind, **tile)
        else:
            tall = many(x)
            sums = weight.new_empty((tall.blocks, 2, channels))
            launch(_block_gradients, (tall.blocks, tall.sides),
                *entered, sums, rows, tall.summed, channels,
                SPAN=compiled_in(len(x), tall.summed), **kind, **tall.tile,
            )  # fmt: skip
            launch(_apply_backward, (triton.cdiv(rows, tall.applied), tall.sides),
                *entered, *left, sums, rows, tall.applied, tall.blocks, channels,
                SPAN=compiled_in(len(x), tall.applied), BLOCKS=tall.most, **kind, **tall.tile,
            )  # fmt: skip
        return dx, dadd if ctx.add else None, dweight, dbias, None, None


def norm_add_relu(
    x: Tensor, add: Tensor | None, norm: nn.BatchNorm2d, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return relu(batch_norm(x) + add), twice for two uses, and update the running statistics."""
    result: tuple[Tensor, Tensor] = _NormAddRelu.apply(x, add, norm.weight, norm.bias, norm, relu)
    return result


def scale_add_relu(x: Tensor, add: Tensor | None, norm: nn.BatchNorm2d, relu: bool) -> Tensor:
    """Return relu(batch_norm(x) + add) with the running statistics, without a gradient."""
    y = torch.empty_like(x)
    if add is not None:
        add = add.contiguous(memory_format=torch.channels_last)
    launch(_scale, (triton.cdiv(x.numel(), 1024),),
        x, x if add is None else add, norm.weight, norm.bias, norm.running_mean, norm.running_var,
        y, x.numel(), x.shape[1], norm.eps, ADD=add is not None, RELU=relu, BLOCK=1024,
    )  # fmt: skip
    return y
