"""One kernel for relu(batch_norm(x) + add): in training, for its gradient, and in evaluation.

A program holds all rows (examples x map positions) of a few channels in registers: it reads them once, computes mean
and variance there, writes the result and moves the running statistics. That fits maps of up to `MOST_ROWS` rows, all
but the largest of a small network; for others `applies` says no.

With g = dy where y > 0, xhat = (x - mean) / std and n rows:

    dbias = sum g,   dweight = sum g xhat,   dadd = g
    dx = weight / std * (g - dbias / n - xhat dweight / n)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

MOST_ROWS = 16384
TILE = 16384
"""Most values a program holds of each tensor."""


@triton.jit
def _forward(
    x, add, weight, bias, y, mean, rstd, running_mean, running_var, tracked,
    rows, channels, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < rows) & (channel < channels)[None, :]
    at = row * channels + channel[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.sum(values, 0) / rows
    centred = tl.where(inside, values - m[None, :], 0.0)
    variance = tl.sum(centred * centred, 0) / rows
    r = 1.0 / tl.sqrt(variance + eps)
    known = channel < channels
    w = tl.load(weight + channel, mask=known, other=0.0)
    b = tl.load(bias + channel, mask=known, other=0.0)
    out = centred * (r * w)[None, :] + b[None, :]
    if ADD:
        out += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        out = tl.maximum(out, 0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + channel, m, mask=known)
    tl.store(rstd + channel, r, mask=known)
    old_mean = tl.load(running_mean + channel, mask=known, other=0.0)
    old_var = tl.load(running_var + channel, mask=known, other=0.0)
    unbiased = variance * (rows / (rows - 1.0))
    tl.store(running_mean + channel, old_mean + momentum * (m - old_mean), mask=known)
    tl.store(running_var + channel, old_var + momentum * (unbiased - old_var), mask=known)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _backward(
    dy, x, y, weight, mean, rstd, dx, dadd, dweight, dbias,
    rows, channels,
    ADD: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    inside = (row < rows) & known[None, :]
    at = row * channels + channel[None, :]
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
    if ADD:
        tl.store(dadd + at, g.to(dadd.dtype.element_ty), mask=inside)
    m = tl.load(mean + channel, mask=known, other=0.0)
    r = tl.load(rstd + channel, mask=known, other=0.0)
    w = tl.load(weight + channel, mask=known, other=0.0)
    xhat = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]) * r[None, :]
    sum_g = tl.sum(g, 0)
    sum_gx = tl.sum(tl.where(inside, g * xhat, 0.0), 0)
    tl.store(dbias + channel, sum_g, mask=known)
    tl.store(dweight + channel, sum_gx, mask=known)
    out = (g - (sum_g / rows)[None, :] - xhat * (sum_gx / rows)[None, :]) * (r * w)[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)


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
        out = tl.maximum(out, 0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def applies(x: Tensor, training: bool) -> bool:
    """Tell whether a map lies with channels last and, in training, is small enough; evaluation has no gradient here."""
    rows = x.numel() // x.shape[1]
    fits = 1 < rows <= MOST_ROWS if training else not torch.is_grad_enabled()
    return fits and x.is_contiguous(memory_format=torch.channels_last)


def _tile(rows: int, channels: int) -> dict[str, int]:
    """Return a program's rows and channels, and its warps."""
    height = max(triton.next_power_of_2(rows), 16)
    width = min(max(TILE // height, 1), 32, triton.next_power_of_2(channels))
    return {"ROWS": height, "CHANNELS": width, "num_warps": min(max(height * width // 1024, 1), 16)}


class _NormAddRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, norm: Any, relu: bool) -> Tensor:
        channels = x.shape[1]
        rows = x.numel() // channels
        y = torch.empty_like(x)
        mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
        tile = _tile(rows, channels)
        if add is not None:
            add = add.contiguous(memory_format=torch.channels_last)
        _forward[(triton.cdiv(channels, tile["CHANNELS"]),)](
            x, x if add is None else add, weight, bias, y, mean, rstd,
            norm.running_mean, norm.running_var, norm.num_batches_tracked,
            rows, channels, norm.eps, norm.momentum, ADD=add is not None, RELU=relu, **tile,
        )  # fmt: skip
        ctx.save_for_backward(x, y, weight, mean, rstd)
        ctx.add, ctx.relu = add is not None, relu
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, mean, rstd = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        rows = x.numel() // channels
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        dadd = torch.empty_like(x) if ctx.add else dx
        tile = _tile(rows, channels)
        _backward[(triton.cdiv(channels, tile["CHANNELS"]),)](
            dy, x, y, weight, mean, rstd, dx, dadd, dweight, dbias,
            rows, channels, ADD=ctx.add, RELU=ctx.relu, **tile,
        )  # fmt: skip
        return dx, dadd if ctx.add else None, dweight, dbias, None, None


def scale_add_relu(x: Tensor, add: Tensor | None, norm: nn.BatchNorm2d, relu: bool) -> Tensor:
    """Return relu(batch_norm(x) + add) with the running statistics, in one kernel and without a gradient."""
    y = torch.empty_like(x)
    if add is not None:
        add = add.contiguous(memory_format=torch.channels_last)
    _scale[(triton.cdiv(x.numel(), 1024),)](
        x, x if add is None else add, norm.weight, norm.bias, norm.running_mean, norm.running_var, y,
        x.numel(), x.shape[1], norm.eps, ADD=add is not None, RELU=relu, BLOCK=1024,
    )  # fmt: skip
    return y


def norm_add_relu(x: Tensor, add: Tensor | None, norm: nn.BatchNorm2d, relu: bool) -> Tensor:
    """Return relu(batch_norm(x) + add) and move the running statistics, in one kernel."""
    result: Tensor = _NormAddRelu.apply(x, add, norm.weight, norm.bias, norm, relu)
    return result
