"""Raw inputs, as a data set stores them, turned into a model's inputs as in evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.data.dataset import Examples
from motley.data.device import ImageData, device_data
from motley.data.transforms import TransformSettings
from motley.models.inputs import (
    KINDS,
    ImageShape,
    InputShape,
    TableShape,
    TokenShape,
    dims_of,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class InputFormat:
    """One input as the data set stores it, and the transform to the model's input.

    Images are stored as (height, width, channels), in bytes or, if `dtype` is float32, in 0 to 1.
    `any_range`: the data set's floats go beyond that. They are used as they are, and no byte stands
    for one of them.
    """

    shape: InputShape
    dtype: str
    transform: TransformSettings
    any_range: bool = False

    @classmethod
    def of(cls, examples: Examples, transform: TransformSettings) -> InputFormat:
        """Describe the inputs of a data set."""
        return cls(examples.shape, str(examples.inputs.dtype), transform, examples.any_range)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of one stored input."""
        if isinstance(self.shape, ImageShape):
            return (self.shape.height, self.shape.width, self.shape.channels)
        return dims_of(self.shape)

    @property
    def model_shape(self) -> InputShape:
        """The shape of the model's input: of an image, that after the transform."""
        if isinstance(self.shape, ImageShape):
            return self.transform.shape_of(self.shape)
        return self.shape

    def blank(self, count: int) -> np.ndarray:
        """Return stored inputs of zeros."""
        return np.zeros((count, *self.dims), dtype=self.dtype)

    def prepare(self, stored: np.ndarray) -> Tensor:
        """Return the model's inputs for stored ones, exactly as evaluation computes them."""
        targets = np.zeros(len(stored), dtype=np.int64)
        examples = Examples(stored, targets, None, self.shape)
        data = device_data(examples, self.transform, CPU, augment=False)
        inputs, _ = data.batch(torch.arange(len(data)))
        return inputs.contiguous()

    def read_array(self, array: np.ndarray, where: str) -> np.ndarray:
        """Return an array of one or several inputs as (N, *dims), in a type that `prepare` takes.

        `where` begins the messages.
        """
        dims = self.dims
        accepted = [dims]
        if isinstance(self.shape, ImageShape) and self.shape.channels == 1:
            accepted.append(dims[:2])  # grey images need no dimension for their one channel
        for accepted_dims in accepted:
            if array.shape == accepted_dims:
                array = array[None]
            if array.ndim and array.shape[1:] == accepted_dims:
                if not len(array):
                    raise MotleyError(f"{where}: has shape {array.shape}: there is no input in it.")
                return self._converted(array.reshape(len(array), *dims), where)
        raise MotleyError(
            f"{where}: has shape {array.shape}; the model takes {KINDS[type(self.shape)]} of shape "
            f"{dims}, or several of them as {('N', *dims)}.".replace("'N'", "N")
        )

    def _converted(self, array: np.ndarray, where: str) -> np.ndarray:
        """Return an array in the type of the stored inputs, after checking its values."""
        if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
            raise MotleyError(f"{where}: holds {array.dtype}, not numbers.")
        if isinstance(self.shape, TokenShape):
            if not np.issubdtype(array.dtype, np.integer):
                raise MotleyError(f"{where}: holds {array.dtype}; token numbers must be integers.")
            _check_range(array, self.shape.vocabulary, f"{where}: token")
            return array.astype(np.int64)
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise MotleyError(f"{where}: holds a value that is not finite.")
        if isinstance(self.shape, ImageShape):
            return self._as_pixels(array, where)
        array = array.astype(np.float32)
        if isinstance(self.shape, TableShape):
            for number, categories in enumerate(self.shape.categories):
                column = self.shape.numbers + number
                _check_range(array[:, column], categories, f"{where}: column {column}: category")
        return array

    def _as_pixels(self, array: np.ndarray, where: str) -> np.ndarray:
        """Return pixels as bytes, or as floats in the range of the data set's."""
        lowest, highest = array.min(initial=0), array.max(initial=0)
        if np.issubdtype(array.dtype, np.floating):
            if not self.any_range and (lowest < 0 or highest > 1):
                raise MotleyError(
                    f"{where}: has pixels from {lowest:g} to {highest:g}; floating-point pixels "
                    "must be in 0 to 1, and bytes in 0 to 255. They must not be normalized yet."
                )
            return array.astype(np.float32)
        if self.any_range:
            raise MotleyError(
                f"{where}: has whole numbers as pixels, and the data set has floating-point "
                "numbers that are not in 0 to 1. Convert the pixels as it was done for the data "
                "set, and give them as .npy."
            )
        if lowest < 0 or highest > 255:
            raise MotleyError(
                f"{where}: has pixels from {lowest} to {highest}; allowed are 0 to 255."
            )
        return array.astype(np.uint8)


def _check_range(numbers: np.ndarray, count: int, what: str) -> None:
    wrong = (numbers < 0) | (numbers >= count) | (numbers != np.floor(numbers))
    if wrong.any():
        raise MotleyError(f"{what} {numbers[wrong][0]:g}: must be one of 0 to {count - 1}.")


class WithNormalization(nn.Module):
    """A model that takes stored images (N, height, width, channels) and normalizes them itself."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, inputs: InputFormat) -> None:
        super().__init__()
        if not isinstance(inputs.shape, ImageShape):
            kind = KINDS[type(inputs.shape)]
            raise MotleyError(
                f"--with-normalization: the model takes {kind}, which are not normalized."
            )
        blank = Examples(inputs.blank(1), np.zeros(1, dtype=np.int64))
        data = ImageData(blank, inputs.transform, CPU, augment=False)
        self.model = model
        self.register_buffer("shift", data.shift)
        self.register_buffer("scale", data.scale)
        side = inputs.transform.resize
        self.side = 0 if (inputs.shape.height, inputs.shape.width) == (side, side) else side
        self.shrinks = side < max(inputs.shape.height, inputs.shape.width)

    def forward(self, images: Tensor) -> Tensor:
        """Return the model's outputs for images with the pixels of the data set."""
        x = ((images.float() - self.shift) / self.scale).permute(0, 3, 1, 2)
        if self.side:
            x = F.interpolate(
                x, size=(self.side, self.side), mode="bilinear", antialias=self.shrinks
            )
        return self.model(x)
