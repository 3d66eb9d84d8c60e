"""Convolutions on small maps, and their gradients.

cuDNN chooses kernels that are fastest when nothing else runs. Their programs are large, so those of
other clients have to wait for a multiprocessor. The programs of these kernels are small, and
several of them share a multiprocessor.

A program computes one position of the output map for a block of images. All images of a block need
the same taps there, so taps that would only see padding are left out: on a map of 2x2, 20 of 36.
Sums are always in the same order.

With S the stride, `pad` the padding, and (r, s) a tap:

    y[n, i, j, k]  = sum over r, s, c of  x[n, S i + r - pad, S j + s - pad, c] w[k, r, s, c]
    dx[n, a, b, c] = sum over r, s, k of  dy[n, i, j, k] w[k, r, s, c]   with S i + r - pad = a, ...
    dw[k, r, s, c] = sum over n, i, j of  dy[n, i, j, k] x[n, S i + r - pad, S j + s - pad, c]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motley.kernels import LENGTHS
from motley.kernels.compiling import launch

#: Convolutions with more multiplications per batch are left to cuDNN: its large programs are more
#: efficient if there is enough to do for all of them.
MOST_PRODUCTS = 2**29
#: Images, output channels and input channels that a program works on at a time, by the bytes of a
#: value (2: fp16 and bf16, 4: tf32).
TILES = {
    2: {"IMAGES": 64, "OUTPUTS": 64, "INPUTS": 64, "num_warps": 4, "num_stages": 4},
    4: {"IMAGES": 32, "OUTPUTS": 64, "INPUTS": 32, "num_warps": 4, "num_stages": 4},
}
#: The same for the gradient of the weight.
GRADIENT_TILES = {
    2: {"IMAGES": 64, "OUTPUTS": 64, "INPUTS": 32, "num_warps": 4, "num_stages": 4},
    4: {"IMAGES": 32, "OUTPUTS": 32, "INPUTS": 32, "num_warps": 4, "num_stages": 4},
}
#: With fewer values than this to write, programs write half as many each: they would be too few.
FEW = 64 * 64 * 32
#: All numbers of channels must be multiples of this.
LEAST_CHANNELS = 32
#: Arguments for whose values kernels are not compiled anew, which would take half a second for
#: each kind of convolution in a network.
GEOMETRY = (*LENGTHS, "height", "width", "P", "Q", "HIGH", "ACROSS", "STRIDE", "PADDING")


@triton.jit
def _first_tap(i, side, STRIDE, PADDING, TAPS, BACKWARD: tl.constexpr):
    """Return the first tap that meets the map at position i, and the number of those that do.

    `side` is the length of the map that is read. In the backward pass only every STRIDE-th tap
    meets it.
    """
    if BACKWARD:
        least = i + PADDING - STRIDE * (side - 1)  # the tap that meets the last position
        most = tl.minimum(i + PADDING, TAPS - 1)
        first = tl.maximum(least, 0)
        # Taps meet whole positions only if they are as far from `least` as a multiple of STRIDE.
        first += ((least - first) % STRIDE + STRIDE) % STRIDE
        count = tl.maximum((most - first + STRIDE) // STRIDE, 0)
    else:
        first = tl.maximum(PADDING - i * STRIDE, 0)
        count = tl.maximum(tl.minimum(side + PADDING - i * STRIDE, TAPS) - first, 0)
    return first, count


@triton.jit(do_not_specialize=GEOMETRY)
def _convolve(
    x, weight, y, rows, height, width, P, Q, inputs, outputs, HIGH, ACROSS, STRIDE, PADDING,
    BACKWARD: tl.constexpr, IMAGES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y, or with BACKWARD dx, where `x` is dy. `rows` is the number of images.

    The map that is read has `height` x `width` positions and `inputs` channels, the one that is
    written P x Q and `outputs`. The weight has HIGH x ACROSS taps.
    """
    blocks = tl.cdiv(rows, IMAGES)
    place = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * IMAGES + tl.arange(0, IMAGES)
    i, j = place // Q, place % Q
    k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, INPUTS)
    known = (n < rows)[:, None]
    first_r, count_r = _first_tap(i, height, STRIDE, PADDING, HIGH, BACKWARD)
    first_s, count_s = _first_tap(j, width, STRIDE, PADDING, ACROSS, BACKWARD)
    pieces = inputs // INPUTS
    total = tl.zeros((IMAGES, OUTPUTS), tl.float32)
    for step in range(count_r * count_s * pieces):
        tap, start = step // pieces, step % pieces * INPUTS
        if BACKWARD:
            r = first_r + tap // count_s * STRIDE
            s = first_s + tap % count_s * STRIDE
            a, b = (i + PADDING - r) // STRIDE, (j + PADDING - s) // STRIDE
            # (channel of dy, channel of dx), with the latter contiguous in memory
            at = ((start + c)[:, None] * HIGH * ACROSS + r * ACROSS + s) * outputs + k[None, :]
        else:
            r, s = first_r + tap // count_s, first_s + tap % count_s
            a, b = i * STRIDE + r - PADDING, j * STRIDE + s - PADDING
            at = (k[None, :] * HIGH * ACROSS + r * ACROSS + s) * inputs + (start + c)[:, None]
        pixels = x + ((n * height + a) * width + b)[:, None] * inputs + (start + c)[None, :]
        values = tl.load(pixels, mask=known, other=0.0)
        total = tl.dot(values, tl.load(weight + at), total, input_precision=PRECISION)
    to = y + ((n * P + i) * Q + j)[:, None] * outputs + k[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=known)


@triton.jit
def _positions(r, side, P, STRIDE, PADDING):
    """Return the first output position at which a tap meets the map, and the number of those."""
    first = tl.maximum((PADDING - r + STRIDE - 1) // STRIDE, 0)
    end = tl.minimum((side + PADDING - r + STRIDE - 1) // STRIDE, P)
    return first, tl.maximum(end - first, 0)


@triton.jit(do_not_specialize=GEOMETRY)
def _gradient(
    x, dy, dweight, rows, height, width, P, Q, inputs, outputs, HIGH, ACROSS, STRIDE, PADDING,
    IMAGES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of one tap's dw. `rows` is the number of images."""
    sides = tl.cdiv(inputs, INPUTS)
    tap = tl.program_id(0) // sides
    r, s = tap // ACROSS, tap % ACROSS
    c = tl.program_id(0) % sides * INPUTS + tl.arange(0, INPUTS)
    k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first_i, count_i = _positions(r, height, P, STRIDE, PADDING)
    first_j, count_j = _positions(s, width, Q, STRIDE, PADDING)
    blocks = tl.cdiv(rows, IMAGES)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for step in range(count_i * count_j * blocks):
        place = step // blocks
        n = step % blocks * IMAGES + tl.arange(0, IMAGES)
        i, j = first_i + place // count_j, first_j + place % count_j
        a, b = i * STRIDE + r - PADDING, j * STRIDE + s - PADDING
        pixels = x + ((n * height + a) * width + b)[:, None] * inputs + c[None, :]
        values = tl.load(pixels, mask=(n < rows)[:, None] & (c < inputs)[None, :], other=0.0)
        places = dy + ((n * P + i) * Q + j)[:, None] * outputs + k[None, :]
        g = tl.load(places, mask=(n < rows)[:, None] & (k < outputs)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), values, total, input_precision=PRECISION)
    into = dweight + (k[:, None] * HIGH * ACROSS + tap) * inputs + c[None, :]
    tl.store(
        into,
        total.to(dweight.dtype.element_ty),
        mask=(k < outputs)[:, None] & (c < inputs)[None, :],
    )


def _tile(x: Tensor, y: Tensor) -> dict[str, int]:
    """Return the tile for computing y from x, or dx (`y`) from dy (`x`)."""
    tile = dict(TILES[x.dtype.itemsize])
    if y.numel() < FEW or y.shape[1] % tile["OUTPUTS"]:
        tile["OUTPUTS"] = LEAST_CHANNELS
    if x.shape[1] % tile["INPUTS"]:
        tile["INPUTS"] = LEAST_CHANNELS
    return tile


def run(
    x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, tile: Mapping[str, int],
    *, backward: bool,
) -> None:  # fmt: skip
    """Compute y from x, or dx (`y`) from dy (`x`). Channels must be multiples of the tile's."""
    inputs, outputs, places = x.shape[1], y.shape[1], y.shape[2] * y.shape[3]
    grid = (places * triton.cdiv(len(x), tile["IMAGES"]), outputs // tile["OUTPUTS"])
    launch(
        _convolve, grid, x, weight, y, len(x), *x.shape[2:], *y.shape[2:], inputs, outputs,
        *weight.shape[2:], stride, padding, BACKWARD=backward, PRECISION="tf32", **tile,
    )  # fmt: skip


def weight_gradient(
    x: Tensor, dy: Tensor, dweight: Tensor, stride: int, padding: int, tile: Mapping[str, int]
) -> None:
    """Compute dw."""
    outputs, inputs, high, across = dweight.shape
    tiles_of_inputs = triton.cdiv(inputs, tile["INPUTS"])
    grid = (high * across * tiles_of_inputs, triton.cdiv(outputs, tile["OUTPUTS"]))
    launch(
        _gradient, grid, x, dy, dweight, len(x), *x.shape[2:], *dy.shape[2:], inputs, outputs,
        high, across, stride, padding, PRECISION="tf32", **tile,
    )  # fmt: skip


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        sides = [
            output_side(side, taps, stride, padding)
            for side, taps in zip(x.shape[2:], weight.shape[2:], strict=True)
        ]
        shape = (len(x), len(weight), *sides)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        run(x, weight, y, stride, padding, _tile(x, y), backward=False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            run(dy, weight, dx, ctx.stride, ctx.padding, _tile(dy, dx), backward=True)
        dweight = torch.empty_like(weight)
        tile = GRADIENT_TILES[x.dtype.itemsize]
        weight_gradient(x, dy, dweight, ctx.stride, ctx.padding, tile)
        return dx, dweight, None, None


def output_side(side: int, taps: int, stride: int, padding: int) -> int:
    """Return the length of the output map for a length of the input map."""
    return (side + 2 * padding - taps) // stride + 1


def matches(x: Tensor, weight: Tensor) -> bool:
    """Tell whether a kernel can read a batch and a weight: channels last, of one type and depth.

    `torch.func.functional_call` may lend a layer a weight with another layout than its own has.
    """
    return (
        x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and x.dtype == weight.dtype
        and x.shape[1] == weight.shape[1]
    )


def applies(x: Tensor, convolution: nn.Conv2d) -> bool:
    """Tell whether the kernels can be used: in training, for small maps with enough channels.

    Not in fp32, because they multiply single-precision numbers in tf32. Inputs that torch rejects
    are left to torch, whose messages say what is wrong; the kernels would read outside of a tensor.
    """
    if not torch.is_grad_enabled() or convolution.bias is not None:
        return False
    if x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32:
        return False
    if x.dtype.itemsize not in TILES or not matches(x, convolution.weight):
        return False
    strides, paddings = convolution.stride, convolution.padding
    square = strides[0] == strides[1] and paddings[0] == paddings[1]
    if not square or convolution.groups != 1 or convolution.dilation != (1, 1):
        return False
    outputs, inputs, *kernel = convolution.weight.shape
    if inputs % LEAST_CHANNELS or outputs % LEAST_CHANNELS:
        return False
    products = len(x) * inputs * outputs
    for side, taps in zip(x.shape[2:], kernel, strict=True):
        length = output_side(side, taps, strides[0], int(paddings[0]))
        if length < 1:
            return False
        products *= length * taps
    return products <= MOST_PRODUCTS


def convolve(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Apply a convolution to a batch."""
    result: Tensor = _Convolve.apply(
        x, convolution.weight, convolution.stride[0], convolution.padding[0]
    )
    return result
