"""Random crop, flip, normalisation and cutout of a batch in one kernel: a program makes one image."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _augment(
    images, rows, draws, shift, scale, into, line, picture,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDING: tl.constexpr, FLIP: tl.constexpr,
    CUTOUT: tl.constexpr, DRAWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    drawn = draws + number * DRAWS
    at = tl.arange(0, VALUES)
    inside = at < HEIGHT * WIDTH * CHANNELS
    y, x, channel = at // (WIDTH * CHANNELS), at // CHANNELS % WIDTH, at % CHANNELS
    top = (tl.load(drawn) * (2 * PADDING + 1)).to(tl.int32)
    left = (tl.load(drawn + 1) * (2 * PADDING + 1)).to(tl.int32)
    column = x
    if FLIP:
        column = tl.where(tl.load(drawn + 4) < 0.5, x, WIDTH - 1 - x)
    source = images + tl.load(rows + number) * picture + (y + top) * line + (column + left) * CHANNELS + channel
    value = tl.load(source, mask=inside, other=0).to(tl.float32)
    value = (value - tl.load(shift + channel)) / tl.load(scale + channel)
    if CUTOUT > 0:
        first_y = (tl.load(drawn + 5) * HEIGHT).to(tl.int32) - CUTOUT // 2
        first_x = (tl.load(drawn + 6) * WIDTH).to(tl.int32) - CUTOUT // 2
        cut = (y >= first_y) & (y < first_y + CUTOUT) & (x >= first_x) & (x < first_x + CUTOUT)
        value = tl.where(cut, 0.0, value)
    target = into + number.to(tl.int64) * HEIGHT * WIDTH * CHANNELS + at
    tl.store(target, value.to(into.dtype.element_ty), mask=inside)


def augment(
    images: Tensor, rows: Tensor, draws: Tensor, shift: Tensor, scale: Tensor, into: Tensor, *,
    padding: int, flip: bool, cutout: int,
) -> None:  # fmt: skip
    """Fill `into` (N, H, W, C) with augmented images: `images` are padded, `draws` are numbers in [0, 1)."""
    count, height, width, channels = into.shape
    _augment[(count,)](
        images, rows, draws, shift, scale, into, images.stride(1), images.stride(0),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, PADDING=padding, FLIP=flip, CUTOUT=cutout,
        DRAWS=draws.shape[1], VALUES=triton.next_power_of_2(height * width * channels),
    )  # fmt: skip
