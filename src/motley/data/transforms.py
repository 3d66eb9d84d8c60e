"""Settings of the image transform between data set and model, and the papers' transforms by name.

Pixels are scaled to [0, 1], then normalised with `mean` and `std`. Only training images are
augmented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from motley.core.errors import MotleyError, unknown
from motley.models.inputs import KINDS, ImageShape, InputShape
from motley.settings import Settings


class TransformSettings(Settings):
    """Resizing, normalisation and augmentation of images. The variant fills in missing keys."""

    lasting = ()

    variant: str = "plain"
    """plain, or a paper's transform for this data set: inco, inco-vit, fedimpro. The other keys of
    the table override it.
    """
    channels: int = Field(default=0, ge=0)
    """Channels of the model's input, each a copy of a grey image's one channel: 3 for weights that
    were pretrained on colour images. 0: images keep their channels.
    """
    resize: int = Field(default=0, ge=0)
    """Side in pixels to which images are scaled (bilinear); 0: they keep their size."""
    mean: tuple[float, ...] = ()
    """Mean per channel that is subtracted, for pixels in 0..1; empty: no normalisation."""
    std: tuple[float, ...] = ()
    """Standard deviation per channel to divide by, for pixels in 0..1; empty: no normalisation."""
    crop_padding: int = Field(default=0, ge=0)
    """Pixels of black padding on every side before a random crop of the original size; 0: no
    random crop.
    """
    flip: bool = False
    """Mirror training images left to right with probability 1/2."""
    cutout: int = Field(default=0, ge=0)
    """Side in pixels of a random square that is set to zero after normalisation; 0: none."""
    rotate: float = Field(default=0.0, ge=0, le=180)
    """Training images are rotated by up to this many degrees in either direction; 0: not at all."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """Training images get another contrast, by a factor of 1 - jitter to 1 + jitter, and another
    brightness, by -jitter to +jitter standard deviations (pixels, without `std`). 0: none.
    """
    resized_crop: bool = False
    """Random crop of 8 to 100 % of the area with aspect ratio 3/4 to 4/3, scaled to `resize`."""

    @model_validator(mode="after")
    def _fits_together(self) -> TransformSettings:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} values and std {len(self.std)}; "
                "both need one value per channel"
            )
        if any(value <= 0 for value in self.std):
            raise ValueError(f"std = {list(self.std)} must be positive")
        if self.resized_crop and not self.resize:
            raise ValueError("resized_crop needs resize, the size to scale to")
        if self.resized_crop and self.crop_padding:
            raise ValueError("resized_crop and crop_padding exclude each other")
        return self

    def refuse_other_inputs(self, shape: InputShape) -> None:
        """Raise an error if a transform is set for inputs that are not images."""
        settings = self.model_dump(exclude_defaults=True, exclude={"variant"})
        for key, value in settings.items():
            raise MotleyError(
                f"data.transform.{key} = {value!r}: the data set has {KINDS[type(shape)]}, and "
                "transforms are for images."
            )

    def shape_of(self, shape: ImageShape) -> ImageShape:
        """Return the shape of an image after the transform, given its shape before."""
        channels = self.channels or shape.channels
        if shape.channels not in (1, channels):
            raise MotleyError(
                f"data.transform.channels = {self.channels}: only grey images can be copied; "
                f"these have {shape.channels} channels. Use data.transform.channels = 0."
            )
        return ImageShape(channels, self.resize or shape.height, self.resize or shape.width)


_CROP_AND_FLIP = {"crop_padding": 4, "flip": True}
_CIFAR10 = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616], **_CROP_AND_FLIP}
_CIFAR100 = {"mean": [0.5071, 0.4865, 0.4409], "std": [0.2673, 0.2564, 0.2762], **_CROP_AND_FLIP}
_CINIC10 = {"mean": [0.4789, 0.4723, 0.4305], "std": [0.2421, 0.2383, 0.2587], **_CROP_AND_FLIP}
_HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
_VIT = {"resize": 224, "resized_crop": True, "flip": True, **_HALF}

#: Variant -> data set -> the values that the variant gives to other keys. An empty table: the
#: paper's code scales pixels to [0, 1] and does nothing else.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"digits": {"resize": 16}},
    "inco": {
        "cifar10": {**_CIFAR10, "cutout": 16},
        "cinic10": _CINIC10,
        "svhn": {**_HALF, "cutout": 16},
        "fashion-mnist": {"resize": 32},
    },
    "inco-vit": {
        "cifar10": _VIT,
        "cinic10": _VIT,
        "svhn": _VIT,
        "fashion-mnist": {"resize": 224, "channels": 3},
    },
    "fedimpro": {
        "cifar10": _CIFAR10,
        "cifar100": {**_CIFAR100, "cutout": 16},
        "svhn": {},
        "fashion-mnist": {"resize": 32},
        "femnist": {},
    },
}


def variants_for(data_name: str, transform: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of every variant for a data set.

    A transform whose variant has no values for the data set is an error.
    """
    variant = str(transform.get("variant", "plain"))
    if variant not in VARIANTS:
        raise MotleyError(f"data.transform.variant: {unknown('transform', variant, VARIANTS)}")
    data_sets = VARIANTS[variant]
    if variant != "plain" and data_name not in data_sets:
        raise MotleyError(
            f"data.transform.variant = {variant!r}: is defined for {', '.join(sorted(data_sets))}, "
            f"not for {data_name!r}. Use data.transform.variant = 'plain', which is "
            "defined for every data set."
        )
    return {name: values.get(data_name, {}) for name, values in VARIANTS.items()}
