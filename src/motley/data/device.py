"""A data set as one tensor on the device, and batches cut out of it there.

No loader and no worker: a batch is one gather. Padding for random crops is done once for the whole set, so that a crop
and a flip are the same gather with other rows and columns. The random numbers of a batch are given, not drawn: they are
part of a client's plan, and so the same on every device and in every order of execution.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.errors import MotleyError
from motley.data.dataset import Examples
from motley.data.transforms import TransformSettings
from motley.limits import allocating, check_fits
from motley.models import ImageShape

DRAWS = 7
"""Random numbers an image may use: four for a crop (a padded one uses two), one for the flip, two for the cutout."""


class DeviceData:
    """Examples on a device, with their transform."""

    def __init__(
        self, examples: Examples, transform: TransformSettings, device: torch.device, *, augment: bool
    ) -> None:
        self.device = device
        self.transform = transform
        images = torch.from_numpy(examples.images)
        _, self.height, self.width, self.channels = images.shape
        if len(transform.mean) not in (0, self.channels):
            raise MotleyError(
                f"data.transform.mean has {len(transform.mean)} values; the images have {self.channels} channels."
            )
        self.random = augment and (
            transform.crop_padding > 0 or transform.flip or transform.cutout > 0 or transform.resized_crop
        )
        pad = transform.crop_padding if self.random else 0
        padded = f", padded by data.transform.crop_padding = {pad}" if pad else ""
        with allocating(f"the {len(images)} images of the data set{padded}"):
            self.images = (F.pad(images, (0, 0, pad, pad, pad, pad)) if pad else images).to(device)
        self._unpadded = self.images[:, pad : pad + self.height, pad : pad + self.width]
        self.labels = torch.from_numpy(examples.labels).to(device)
        scale = torch.tensor(transform.std or (1.0,) * self.channels) * 255
        shift = torch.tensor(transform.mean or (0.0,) * self.channels) * 255
        self.shift, self.scale = shift.to(device), scale.to(device)
        self._rows = torch.arange(self.height, device=device)
        self._columns = torch.arange(self.width, device=device)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> ImageShape:
        """What a model is fed."""
        return self.transform.shape_of(ImageShape(self.channels, self.height, self.width))

    def check_batch_fits(self, key: str, size: int) -> None:
        """Refuse a batch size, of the setting `key`, if the images of one batch are larger than the memory."""
        side = f", data.transform.resize = {self.transform.resize}" if self.transform.resize else ""
        image = "x".join(str(length) for length in self.shape)
        bytes_of_batch = size * math.prod(self.shape) * 4
        check_fits(f"{key} = {size}{side}: one batch of {image} images", bytes_of_batch, self.device)

    def batch(self, rows: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return images (N, C, H, W; channels last in memory) and labels of the given rows.

        `draws` holds `DRAWS` numbers in [0, 1) an image; without it nothing is augmented.
        """
        if self.random and draws is not None:
            return self._augmented(rows, draws), self.labels[rows]
        return self._resized(self._normalized(self._unpadded[rows])), self.labels[rows]

    def fill(self, into: Tensor, rows: Tensor, draws: Tensor | None) -> None:
        """Write a batch's images into a tensor (N, H, W, C), in its type."""
        into.copy_(self.batch(rows, draws)[0].permute(0, 2, 3, 1))

    def _augmented(self, rows: Tensor, draws: Tensor) -> Tensor:
        transform = self.transform
        top = left = torch.zeros_like(rows)
        if transform.crop_padding:
            top = (draws[:, 0] * (2 * transform.crop_padding + 1)).long()
            left = (draws[:, 1] * (2 * transform.crop_padding + 1)).long()
        columns = self._columns.expand(len(rows), -1)
        if transform.flip:
            columns = torch.where(draws[:, 4:5] < 0.5, columns, self.width - 1 - columns)
        ys = (self._rows + top[:, None])[:, :, None]
        xs = (columns + left[:, None])[:, None, :]
        images = self._normalized(self.images[rows[:, None, None], ys, xs])
        images = self._resized_crop(images, draws) if transform.resized_crop else self._resized(images)
        return self._cut_out(images, draws[:, 5:7]) if transform.cutout else images

    def _normalized(self, images: Tensor) -> Tensor:
        return ((images.float() - self.shift) / self.scale).permute(0, 3, 1, 2)

    def _resized(self, images: Tensor) -> Tensor:
        side = self.transform.resize
        if not side or (self.height, self.width) == (side, side):
            return images
        smaller = side < max(self.height, self.width)
        return F.interpolate(images, size=(side, side), mode="bilinear", antialias=smaller)

    def _resized_crop(self, images: Tensor, draws: Tensor) -> Tensor:
        """Cut a box of random area and aspect and scale it: torchvision's RandomResizedCrop with one try a box.

        A box that would leave the image is clipped to it, where torchvision draws up to ten times.
        """
        area = 0.08 + 0.92 * draws[:, 0]
        stretch = torch.exp((2 * draws[:, 1] - 1) * (math.log(4 / 3) / 2))
        width = (area.sqrt() * stretch).clamp(max=1.0)
        height = (area.sqrt() / stretch).clamp(max=1.0)
        middle_x = (2 * draws[:, 2] - 1) * (1 - width)
        middle_y = (2 * draws[:, 3] - 1) * (1 - height)
        zero = torch.zeros_like(width)
        theta = torch.stack([width, zero, middle_x, zero, height, middle_y], dim=1).view(-1, 2, 3)
        side = self.transform.resize
        grid = F.affine_grid(theta, [len(images), self.channels, side, side], align_corners=False)
        cropped = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return cropped.contiguous(memory_format=torch.channels_last)

    def _cut_out(self, images: Tensor, draws: Tensor) -> Tensor:
        height, width = images.shape[2:]
        side = self.transform.cutout
        top = (draws[:, 0:1] * height).long() - side // 2
        left = (draws[:, 1:2] * width).long() - side // 2
        ys = torch.arange(height, device=images.device)
        xs = torch.arange(width, device=images.device)
        rows = (ys >= top) & (ys < top + side)
        columns = (xs >= left) & (xs < left + side)
        return images.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
