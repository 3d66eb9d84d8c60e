"""The weight gradient of convolutions with small output maps.

cuDNN spreads this sum over the whole GPU, which is fastest when nothing else runs, and wasteful
next to the kernels of other clients. Here each program computes a tile of one tap's gradient in a
loop over all output positions, always in the same order. The forward pass and the gradient of the
input are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from motley.kernels import LENGTHS, compiled_in

#: The largest numbers of output positions in a batch for which this kernel is used. The limit is
#: higher for 1x1 kernels, which have a single tap.
MOST_ROWS, MOST_ROWS_OF_1X1 = 256, 4096
TILE = {"OUTPUTS": 64, "INPUTS": 32, "ROWS": 64, "num_warps": 4, "num_stages": 4}


@triton.jit(do_not_specialize=LENGTHS)
def _gradient(
    x, dy, dweight, rows, height, width, P, Q, inputs, outputs, ACROSS, TAPS, stride, padding,
    SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sides = tl.cdiv(inputs, INPUTS)
    tap = tl.program_id(0) // sides
    c = tl.program_id(0) % sides * INPUTS + tl.arange(0, INPUTS)
    k = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    length = SPAN if SPAN > 0 else rows
    for start in range(0, length, ROWS):
        p = start + tl.arange(0, ROWS)
        i = p // Q % P * stride + tap // ACROSS - padding
        j = p % Q * stride + tap % ACROSS - padding
        met = (p < rows) & (i >= 0) & (i < height) & (j >= 0) & (j < width)
        at = ((p // (P * Q) * height + i) * width + j)[:, None] * inputs + c[None, :]
        values = tl.load(x + at, mask=met[:, None] & (c < inputs)[None, :], other=0.0)
        inside = (p < rows)[:, None] & (k < outputs)[None, :]
        g = tl.load(dy + p[:, None] * outputs + k[None, :], mask=inside, other=0.0)
        total = tl.dot(tl.trans(g), values, total)
    into = dweight + (k[:, None] * TAPS + tap) * inputs + c[None, :]
    tl.store(
        into,
        total.to(dweight.dtype.element_ty),
        mask=(k < outputs)[:, None] & (c < inputs)[None, :],
    )


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        outputs, inputs, taps, across = weight.shape
        dweight, rows = torch.empty_like(weight), dy.numel() // outputs
        grid = (
            taps * across * triton.cdiv(inputs, TILE["INPUTS"]),
            triton.cdiv(outputs, TILE["OUTPUTS"]),
        )
        _gradient[grid](
            x, dy, dweight, rows, *x.shape[2:], *dy.shape[2:], inputs, outputs,
            across, taps * across, ctx.stride, ctx.padding, SPAN=compiled_in(len(x), rows), **TILE,
        )  # fmt: skip
        sides = [ctx.stride] * 2, [ctx.padding] * 2, [1, 1]
        dx, _, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, *sides, False, [0, 0], 1, [ctx.needs_input_grad[0], False, False]
        )
        return dx, dweight, None, None


def applies(x: Tensor, convolution: nn.Conv2d) -> bool:
    """Tell whether the kernel can be used: 16-bit inputs with few enough output positions."""
    if x.dtype.itemsize != 2 or not torch.is_grad_enabled() or convolution.bias is not None:
        return False
    kernel, (stride, across), padding = (
        convolution.kernel_size,
        convolution.stride,
        convolution.padding[0],
    )
    rows = len(x)
    for side, taps in zip(x.shape[2:], kernel, strict=True):
        rows *= (side + 2 * int(padding) - taps) // stride + 1
    most = MOST_ROWS_OF_1X1 if kernel == (1, 1) else MOST_ROWS
    plain = convolution.groups == 1 and convolution.dilation == (1, 1) and stride == across
    return plain and rows <= most and x.is_contiguous(memory_format=torch.channels_last)


def convolve(x: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Apply a convolution to a batch."""
    result: Tensor = _Convolve.apply(
        x, convolution.weight, convolution.stride[0], convolution.padding[0]
    )
    return result
