"""Crop, flip, normalization and cutout of a batch of images in one kernel.

With torch's operations these are some thirty kernels per client and round. They take the GPU little
time, but the host needs a millisecond to queue them, in which the client cannot begin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from motley.kernels.compiling import launch

#: The largest number of values of an image: one program makes a whole image.
MOST_VALUES = 2**14
#: With more values per warp, a program needs more registers than there are: images of 64x64.
VALUES_PER_WARP = 1024


@triton.jit
def _augment(
    images, rows, draws, shift, scale, into, line, picture,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDING: tl.constexpr,
    FLIP: tl.constexpr, CUTOUT: tl.constexpr, DRAWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Write one image. `line` and `picture` are the lengths of a stored line and image."""
    number = tl.program_id(0).to(tl.int64)
    drawn = draws + number * DRAWS
    at = tl.arange(0, VALUES)
    inside = at < HEIGHT * WIDTH * CHANNELS
    y, x, channel = at // (WIDTH * CHANNELS), at // CHANNELS % WIDTH, at % CHANNELS
    top = (tl.load(drawn) * (2 * PADDING + 1)).to(tl.int32)
    left = (tl.load(drawn + 1) * (2 * PADDING + 1)).to(tl.int32)
    column = x
    if FLIP:
        column = tl.where(tl.load(drawn + 4) < 0.5, x, WIDTH - 1 - x)
    stored = images + tl.load(rows + number) * picture
    place = (y + top) * line + (column + left) * CHANNELS + channel
    value = tl.load(stored + place, mask=inside, other=0).to(tl.float32)
    value = tl.div_rn(value - tl.load(shift + channel), tl.load(scale + channel))
    if CUTOUT > 0:
        first_y = (tl.load(drawn + 5) * HEIGHT).to(tl.int32) - CUTOUT // 2
        first_x = (tl.load(drawn + 6) * WIDTH).to(tl.int32) - CUTOUT // 2
        in_rows = (y >= first_y) & (y < first_y + CUTOUT)
        in_columns = (x >= first_x) & (x < first_x + CUTOUT)
        value = tl.where(in_rows & in_columns, 0.0, value)
    target = into + number * HEIGHT * WIDTH * CHANNELS + at
    tl.store(target, value.to(into.dtype.element_ty), mask=inside)


def augment(
    images: Tensor, rows: Tensor, draws: Tensor, shift: Tensor, scale: Tensor, into: Tensor, *,
    padding: int, flip: bool, cutout: int,
) -> None:  # fmt: skip
    """Fill `into` (N, H, W, C) with augmented images.

    `images` are all images of the data set, padded. `draws` are numbers in [0, 1), in the columns
    that `motley.data.device.DRAWS` describes.
    """
    count, height, width, channels = into.shape
    values = triton.next_power_of_2(height * width * channels)
    launch(
        _augment, (count,), images, rows, draws, shift, scale, into,
        images.stride(1), images.stride(0),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, PADDING=padding, FLIP=flip, CUTOUT=cutout,
        DRAWS=draws.shape[1], VALUES=values, num_warps=max(4, values // VALUES_PER_WARP),
    )  # fmt: skip
