"""Convolutions in blocks of output positions: an alternative to `motley.kernels.convolve` for large maps.

There, a program computes one position of the map for a block of images. Here, a block is any `IMAGES` consecutive positions
of all images (an implicit matrix product of N P Q rows), so that neighbours on the map share the inputs that they read. In
return, taps that see only padding are multiplied too.

For dx, positions are divided by their remainders modulo the stride: within such a class, all positions meet the same taps.
For dw, positions are divided among programs, whose sums are then added up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from motley.kernels.compiling import launch
from motley.kernels.convolve import GEOMETRY

#: About as many programs as can run at once: an H200 has 132 multiprocessors, and two to four share one.
PROGRAMS = 396


@triton.jit(do_not_specialize=GEOMETRY)
def _convolve(
    x, weight, y, rows, height, width, P, Q, inputs, outputs, HIGH, ACROSS, STRIDE, PADDING,
    BACKWARD: tl.constexpr, IMAGES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Write y, or with BACKWARD dx, where `x` is dy. `rows` is the number of images."""
    lattice = STRIDE if BACKWARD else 1
    row, column = tl.program_id(2) // lattice, tl.program_id(2) % lattice
    high, across = tl.cdiv(P, lattice), tl.cdiv(Q, lattice)
    p = tl.program_id(1) * IMAGES + tl.arange(0, IMAGES)
    n = p // (high * across)
    i, j = p // across % high * lattice + row, p % across * lattice + column
    known = (n < rows) & (i < P) & (j < Q)
    k = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, INPUTS)
    pieces = inputs // INPUTS
    if BACKWARD:
        first_r, first_s = (row + PADDING) % STRIDE, (column + PADDING) % STRIDE
        count_r = tl.maximum((HIGH - first_r + STRIDE - 1) // STRIDE, 0)
        count_s = tl.maximum((ACROSS - first_s + STRIDE - 1) // STRIDE, 0)
    else:
        first_r, first_s, count_r, count_s = 0, 0, HIGH, ACROSS
    total = tl.zeros((IMAGES, OUTPUTS), tl.float32)
    for step in range(count_r * count_s * pieces):
        tap, start = step // pieces, step % pieces * INPUTS
        r, s = first_r + tap // count_s * lattice, first_s + tap % count_s * lattice
        if BACKWARD:
            # The remainder is 0. A negative place stays negative.
            a, b = (i + PADDING - r) // STRIDE, (j + PADDING - s) // STRIDE
            at = ((start + c)[:, None] * HIGH * ACROSS + r * ACROSS + s) * outputs + k[None, :]
        else:
            a, b = i * STRIDE + r - PADDING, j * STRIDE + s - PADDING
            at = (k[None, :] * HIGH * ACROSS + r * ACROSS + s) * inputs + (start + c)[:, None]
        met = known & (a >= 0) & (a < height) & (b >= 0) & (b < width)
        pixels = x + ((n * height + a) * width + b)[:, None] * inputs + (start + c)[None, :]
        values = tl.load(pixels, mask=met[:, None], other=0.0)
        total = tl.dot(values, tl.load(weight + at), total)
    to = y + ((n * P + i) * Q + j)[:, None] * outputs + k[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=known[:, None])


@triton.jit(do_not_specialize=GEOMETRY)
def _gradient(
    x, dy, sums, rows, span, height, width, P, Q, inputs, outputs, HIGH, ACROSS, STRIDE, PADDING,
    IMAGES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Write a tile of one tap's dw, summed over `span` positions, to sums[block, k, r, s, c]."""
    sides = inputs // INPUTS
    tap = tl.program_id(0) // sides
    r, s = tap // ACROSS, tap % ACROSS
    c = tl.program_id(0) % sides * INPUTS + tl.arange(0, INPUTS)
    k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    block = tl.program_id(2)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, span, IMAGES):
        p = block * span + start + tl.arange(0, IMAGES)
        n, i, j = p // (P * Q), p // Q % P, p % Q
        a, b = i * STRIDE + r - PADDING, j * STRIDE + s - PADDING
        met = (n < rows) & (a >= 0) & (a < height) & (b >= 0) & (b < width)
        pixels = x + ((n * height + a) * width + b)[:, None] * inputs + c[None, :]
        values = tl.load(pixels, mask=met[:, None], other=0.0)
        g = tl.load(dy + p[:, None] * outputs + k[None, :], mask=(n < rows)[:, None], other=0.0)
        total = tl.dot(tl.trans(g), values, total)
    at = ((block * outputs + k)[:, None] * HIGH * ACROSS + tap) * inputs + c[None, :]
    tl.store(sums + at, total)


def run(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, tile: Mapping[str, int],
    *, backward: bool,
) -> None:  # fmt: skip
    """Compute y from x, or dx (`y`) from dy (`x`). Channels must be multiples of the tile's."""
    inputs, outputs = x.shape[1], y.shape[1]
    lattice = stride if backward else 1
    positions = len(y) * triton.cdiv(y.shape[2], lattice) * triton.cdiv(y.shape[3], lattice)
    grid = (outputs // tile["OUTPUTS"], triton.cdiv(positions, tile["IMAGES"]), lattice**2)
    launch(
        _convolve, grid, x, weight, y, len(x), *x.shape[2:], *y.shape[2:], inputs, outputs,
        *weight.shape[2:], stride, padding, BACKWARD=backward, **tile,
    )  # fmt: skip


def weight_gradient(
    x: Tensor, dy: Tensor, dweight: Tensor, stride: int, padding: int, tile: Mapping[str, int]
) -> None:
    """Compute dw."""
    outputs, inputs, high, across = dweight.shape
    tiles = (high * across * (inputs // tile["INPUTS"]), outputs // tile["OUTPUTS"])
    steps = triton.cdiv(dy.numel() // outputs, tile["IMAGES"])
    blocks = min(max(PROGRAMS // (tiles[0] * tiles[1]), 1), steps)
    span = triton.cdiv(steps, blocks) * tile["IMAGES"]
    sums = torch.empty((blocks, outputs, high, across, inputs), device=x.device)
    launch(
        _gradient, (*tiles, blocks), x, dy, sums, len(x), span, *x.shape[2:], *dy.shape[2:],
        inputs, outputs, high, across, stride, padding, **tile,
    )  # fmt: skip
    dweight.copy_(sums.sum(0).permute(0, 3, 1, 2))
