"""A data set that stays on the device, and batches gathered from it there.

There is no data loader and there are no worker processes: a batch is one gather. The images are
padded once, so that a random crop and a flip are the same gather with other row and column indices.
Random numbers are passed in instead of drawn here: they belong to the client's plan, which makes
them the same on every device and in every order of execution.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.errors import MotleyError
from motley.data.dataset import Examples
from motley.data.transforms import TransformSettings
from motley.kernels import AVAILABLE
from motley.limits import allocating, check_fits
from motley.models.inputs import ImageShape, InputShape, dims_of, input_dtype

if AVAILABLE:
    from motley.kernels import augment as augment_kernel

#: Random numbers reserved per image, by column: 0 to 3 for the crop (a padded crop uses only the
#: first two), 4 for the flip, 5 and 6 for the cutout.
DRAWS = 7
#: Further numbers, if rotation or jitter is on: 7 for the angle, 8 for brightness, 9 for contrast.
MORE_DRAWS = 3


def device_data(
    examples: Examples,
    transform: TransformSettings,
    device: torch.device,
    *,
    augment: bool,
    kernel: bool = False,
) -> DeviceData:
    """Put examples on a device. Images are transformed; other inputs are used as they are.

    `kernel`: on a GPU, prepare batches with Motley's own kernel if the transform allows it.
    """
    if isinstance(examples.shape, ImageShape):
        return ImageData(examples, transform, device, augment=augment, kernel=kernel)
    transform.refuse_other_inputs(examples.shape)
    return DeviceData(examples, device)


def _as_tensor(array: np.ndarray) -> Tensor:
    """Return an array as a tensor. One that runs backwards (a[::-1]) is copied: torch has none."""
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


class DeviceData:
    """Examples on a device, with inputs that are used as they are stored."""

    #: Random numbers per example that its augmentation needs.
    num_draws = 0

    def __init__(self, examples: Examples, device: torch.device) -> None:
        self.device = device
        #: The shape of a model's input.
        self.shape: InputShape = examples.shape
        with allocating(f"the {len(examples)} examples of the data set"):
            self.inputs = _as_tensor(examples.inputs).to(device)
        self.targets = _as_tensor(examples.targets).to(device)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def random(self) -> bool:
        """Whether batches are augmented."""
        return self.num_draws > 0

    def check_batch_fits(self, key: str, size: int) -> None:
        """Reject a batch size if the inputs of one batch alone exceed the device's memory.

        `key` is the name of the setting the size came from, for the message.
        """
        dims = "x".join(str(length) for length in dims_of(self.shape))
        bytes_of_batch = size * math.prod(dims_of(self.shape)) * 4
        what = f"{key} = {size}{self._note()}: one batch of {dims} inputs"
        check_fits(what, bytes_of_batch, self.device)

    def _note(self) -> str:
        """Return a remark for the message about memory."""
        return ""

    def batch(self, rows: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the given rows.

        `draws` holds `num_draws` numbers in [0, 1) per example, for augmentation. Without it
        nothing is augmented. Images are (N, C, H, W), and channels last in memory.
        """
        return self._inputs_of(rows, draws), self.targets[rows]

    def _inputs_of(self, rows: Tensor, draws: Tensor | None) -> Tensor:
        return self.inputs[rows].to(input_dtype(self.shape, torch.float32))

    # ---- prepared batches: memory that is filled once per round and read step by step

    def prepared_dims(self) -> tuple[int, ...]:
        """Return the dimensions of one prepared input in memory."""
        return dims_of(self.shape)

    def fill(self, into: Tensor, rows: Tensor, draws: Tensor | None) -> None:
        """Write a batch of inputs into prepared memory, converted to its dtype."""
        into.copy_(self._inputs_of(rows, draws))

    def from_prepared(self, prepared: Tensor) -> Tensor:
        """Return prepared inputs as the model takes them, without a copy."""
        return prepared


class ImageData(DeviceData):
    """Images on a device, with their transform."""

    def __init__(
        self,
        examples: Examples,
        transform: TransformSettings,
        device: torch.device,
        *,
        augment: bool,
        kernel: bool = False,
    ) -> None:
        self.device = device
        self.transform = transform
        # The kernel reads an image as one block of memory, so a transposed array is copied.
        images = _as_tensor(examples.inputs).contiguous()
        _, self.height, self.width, stored_channels = images.shape
        stored_shape = ImageShape(stored_channels, self.height, self.width)
        self.shape: ImageShape = transform.shape_of(stored_shape)
        self.channels = self.shape.channels
        if len(transform.mean) not in (0, self.channels):
            raise MotleyError(
                f"data.transform.mean has {len(transform.mean)} values; "
                f"the images have {self.channels} channels."
            )
        if augment:
            self.num_draws = _num_draws(transform)
        pad = transform.crop_padding if self.random else 0
        padding_note = f", padded by data.transform.crop_padding = {pad}" if pad else ""
        with allocating(f"the {len(images)} images of the data set{padding_note}"):
            if pad:
                images = F.pad(images, (0, 0, pad, pad, pad, pad))
            self.inputs = images.to(device)
        self._unpadded = self.inputs[:, pad : pad + self.height, pad : pad + self.width]
        self.targets = _as_tensor(examples.targets).to(device)
        # Mean and std are given for pixels in 0..1; bytes are stored as 0..255. With
        # data.transform.channels there are more values than stored channels, and normalisation
        # broadcasts to copies.
        brightest = 255 if images.dtype == torch.uint8 else 1
        scale = torch.tensor(transform.std or (1.0,) * self.channels) * brightest
        shift = torch.tensor(transform.mean or (0.0,) * self.channels) * brightest
        self.shift, self.scale = shift.to(device), scale.to(device)
        self._rows = torch.arange(self.height, device=device)
        self._columns = torch.arange(self.width, device=device)
        plain = not (transform.resize or transform.resized_crop)
        plain = plain and not (transform.rotate or transform.jitter)
        on_gpu = kernel and AVAILABLE and device.type == "cuda"
        #: Whether the kernel prepares batches: it crops, flips, normalizes and cuts out.
        self._kernel = on_gpu and plain and stored_channels == self.channels
        if self._kernel:
            values = self.height * self.width * self.channels
            self._kernel = values <= augment_kernel.MOST_VALUES

    def _note(self) -> str:
        resize = self.transform.resize
        return f", data.transform.resize = {resize}" if resize else ""

    def _inputs_of(self, rows: Tensor, draws: Tensor | None) -> Tensor:
        if self.random and draws is not None:
            return self._augmented(rows, draws)
        return self._resized(self._normalized(self._unpadded[rows]))

    def prepared_dims(self) -> tuple[int, ...]:
        """Return height, width and channels: prepared images are channels last."""
        return self.shape.height, self.shape.width, self.shape.channels

    def fill(self, into: Tensor, rows: Tensor, draws: Tensor | None) -> None:
        """Write a batch of images into `into` (N, H, W, C), converted to its dtype."""
        if self._kernel and draws is not None:
            augment_kernel.augment(
                self.inputs,
                rows,
                draws,
                self.shift,
                self.scale,
                into,
                padding=self.transform.crop_padding,
                flip=self.transform.flip,
                cutout=self.transform.cutout,
            )
            return
        into.copy_(self._inputs_of(rows, draws).permute(0, 2, 3, 1))

    def from_prepared(self, prepared: Tensor) -> Tensor:
        """Return prepared images (N, H, W, C) as (N, C, H, W), without a copy."""
        return prepared.permute(0, 3, 1, 2)

    def _augmented(self, rows: Tensor, draws: Tensor) -> Tensor:
        transform = self.transform
        top = left = torch.zeros_like(rows)
        if transform.crop_padding:
            top = (draws[:, 0] * (2 * transform.crop_padding + 1)).long()
            left = (draws[:, 1] * (2 * transform.crop_padding + 1)).long()
        columns = self._columns.expand(len(rows), -1)
        if transform.flip:
            columns = torch.where(draws[:, 4:5] < 0.5, columns, self.width - 1 - columns)
        # Crop and flip in one gather: index arrays of shape (N, H, 1) and (N, 1, W) broadcast.
        ys = (self._rows + top[:, None])[:, :, None]
        xs = (columns + left[:, None])[:, None, :]
        images = self._normalized(self.inputs[rows[:, None, None], ys, xs])
        if transform.resized_crop:
            images = self._resized_crop(images, draws)
        else:
            images = self._resized(images)
        if transform.rotate:
            images = self._rotated(images, draws[:, 7])
        if transform.jitter:
            images = self._jittered(images, draws[:, 8], draws[:, 9])
        return self._cut_out(images, draws[:, 5:7]) if transform.cutout else images

    def _normalized(self, images: Tensor) -> Tensor:
        return ((images.float() - self.shift) / self.scale).permute(0, 3, 1, 2)

    def _resized(self, images: Tensor) -> Tensor:
        side = self.transform.resize
        if not side or (self.height, self.width) == (side, side):
            return images
        shrinks = side < max(self.height, self.width)
        return F.interpolate(images, size=(side, side), mode="bilinear", antialias=shrinks)

    def _resized_crop(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop a box of random area and aspect ratio and scale it to `resize`.

        This is torchvision's RandomResizedCrop with a single try: a box that would leave the image
        is clipped, where torchvision draws again, up to ten times.
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
        cropped = F.grid_sample(
            images, grid, mode="bilinear", padding_mode="border", align_corners=False
        )
        return cropped.contiguous(memory_format=torch.channels_last)

    def _rotated(self, images: Tensor, draws: Tensor) -> Tensor:
        """Rotate around the centre. Corners that come from outside of the image are zero."""
        angles = (2 * draws - 1) * math.radians(self.transform.rotate)
        # affine_grid's coordinates run from -1 to 1 in both directions, whatever the proportions.
        height, width = images.shape[2:]
        cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
        rows = [cos, -sin * (height / width), zero, sin * (width / height), cos, zero]
        theta = torch.stack(rows, dim=1).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        rotated = F.grid_sample(
            images, grid, mode="bilinear", padding_mode="zeros", align_corners=False
        )
        return rotated.contiguous(memory_format=torch.channels_last)

    def _jittered(self, images: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
        """Change the contrast around each image's mean, then the mean itself."""
        strength = self.transform.jitter
        factors = 1 + strength * (2 * contrast - 1)
        shifts = strength * (2 * brightness - 1)
        means = images.mean(dim=(1, 2, 3), keepdim=True)
        return (images - means) * factors[:, None, None, None] + (
            means + shifts[:, None, None, None]
        )

    def _cut_out(self, images: Tensor, draws: Tensor) -> Tensor:
        """Set a square around a random centre to zero; it may reach over the image's edge."""
        height, width = images.shape[2:]
        side = self.transform.cutout
        top = (draws[:, 0:1] * height).long() - side // 2
        left = (draws[:, 1:2] * width).long() - side // 2
        ys = torch.arange(height, device=images.device)
        xs = torch.arange(width, device=images.device)
        in_rows = (ys >= top) & (ys < top + side)
        in_columns = (xs >= left) & (xs < left + side)
        in_square = in_rows[:, :, None] & in_columns[:, None, :]
        return images.masked_fill_(in_square[:, None], 0.0)


def _num_draws(transform: TransformSettings) -> int:
    """Return how many random numbers a transform needs for each training image."""
    if transform.rotate or transform.jitter:
        return DRAWS + MORE_DRAWS
    augments = transform.crop_padding or transform.flip or transform.cutout
    return DRAWS if augments or transform.resized_crop else 0
