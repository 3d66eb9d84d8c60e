"""The data set on the device, against a slow reference that works pixel by pixel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.data.dataset import Examples
from motley.data.device import DRAWS, MORE_DRAWS, device_data
from motley.data.transforms import VARIANTS, TransformSettings
from motley.federation import Federation
from motley.models import ImageShape
from tests.conftest import tiny_config

CPU = torch.device("cpu")
LARGEST = 1 - 2**-24
"""The largest float32 below 1, which is the largest number that is ever drawn."""


def examples(count: int = 12, height: int = 10, width: int = 10, channels: int = 3) -> Examples:
    """Return random images without black pixels, so that black can only be padding."""
    numbers = np.random.default_rng(7)
    images = numbers.integers(1, 256, (count, height, width, channels), dtype=np.uint8)
    return Examples(images, numbers.permutation(count))


def draws(count: int = 12, seed: int = 3) -> torch.Tensor:
    """Return random numbers for `count` images."""
    shape = (count, DRAWS + MORE_DRAWS)
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def drawn(value: float, count: int = 1, **columns: float) -> torch.Tensor:
    """Return draws that are all equal except for some columns: d4=0.7 sets the flip's."""
    table = torch.full((count, DRAWS), value)
    for name, number in columns.items():
        table[:, int(name[1:])] = number
    return table


def batch(
    given: Examples, transform: TransformSettings, table: torch.Tensor | None, augment: bool = True
) -> Any:
    """Return all images, transformed, as an array."""
    data = device_data(given, transform, CPU, augment=augment)
    images, labels = data.batch(torch.arange(len(given)), table)
    assert tuple(images.shape[1:]) == tuple(data.shape)
    assert torch.equal(labels, torch.from_numpy(given.targets))
    return images.numpy()


# --- the reference


def reference(image: np.ndarray, transform: TransformSettings, numbers: Any = None) -> np.ndarray:
    """Transform one image (height, width, channels) to (channels, height, width).

    Each step follows its description in the settings.
    """
    height, width, channels = image.shape
    if numbers is not None:
        if transform.crop_padding:
            pad = transform.crop_padding
            large = np.zeros((height + 2 * pad, width + 2 * pad, channels), np.uint8)
            large[pad : pad + height, pad : pad + width] = image
            top, left = (math.floor(float(number) * (2 * pad + 1)) for number in numbers[:2])
            image = large[top : top + height, left : left + width]
        if transform.flip and numbers[4] >= 0.5:
            image = image[:, ::-1]
    mean = transform.mean or (0.0,) * channels
    std = transform.std or (1.0,) * channels
    planes = np.stack([(image[:, :, c] / 255 - mean[c]) / std[c] for c in range(channels)])
    box = (0.0, 0.0, 1.0, 1.0)
    if numbers is not None and transform.resized_crop:
        box = random_box(*map(float, numbers[:4]))
        planes = np.stack([sampled(plane, transform.resize, box) for plane in planes])
    elif transform.resize:
        planes = np.stack([resized(plane, transform.resize) for plane in planes])
    if numbers is not None and transform.rotate:
        angle = (2 * float(numbers[7]) - 1) * math.radians(transform.rotate)
        planes = np.stack([rotated(plane, angle) for plane in planes])
    if numbers is not None and transform.jitter:
        factor = 1 + (2 * float(numbers[9]) - 1) * transform.jitter
        shift = (2 * float(numbers[8]) - 1) * transform.jitter
        planes = (planes - planes.mean()) * factor + planes.mean() + shift
    if numbers is not None and transform.cutout:
        planes = planes.copy()
        cut_out(planes, transform.cutout, *map(float, numbers[5:7]))
    return planes


def resized(plane: np.ndarray, side: int) -> np.ndarray:
    """Scale with a triangle filter as wide as a new pixel or an old one, whichever is wider."""

    def weights(old: int) -> np.ndarray:
        scale = old / side
        table = np.zeros((side, old))
        for new in range(side):
            for pixel in range(old):
                away = abs((pixel + 0.5) - (new + 0.5) * scale)
                table[new, pixel] = max(0.0, 1 - away / max(1.0, scale))
            table[new] /= table[new].sum()
        return table

    return weights(plane.shape[0]) @ plane @ weights(plane.shape[1]).T


def random_box(area: float, aspect: float, x: float, y: float) -> tuple[float, float, float, float]:
    """Return left, top, width and height as fractions of the image.

    The box has 8 to 100 % of its area and an aspect ratio of 3/4 to 4/3.
    """
    surface = 0.08 + (1 - 0.08) * area
    ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * aspect)
    width, height = min(1.0, math.sqrt(surface * ratio)), min(1.0, math.sqrt(surface / ratio))
    return x * (1 - width), y * (1 - height), width, height


def sampled(plane: np.ndarray, side: int, box: tuple[float, float, float, float]) -> np.ndarray:
    """Sample a box at side x side points, interpolating between the four nearest pixels."""
    left, top, width, height = box
    rows, columns = plane.shape
    result = np.zeros((side, side))
    for i in range(side):
        for j in range(side):
            y = min(max((top + height * (i + 0.5) / side) * rows - 0.5, 0), rows - 1)
            x = min(max((left + width * (j + 0.5) / side) * columns - 0.5, 0), columns - 1)
            y0, x0 = math.floor(y), math.floor(x)
            y1, x1 = min(y0 + 1, rows - 1), min(x0 + 1, columns - 1)
            upper = plane[y0, x0] * (1 - (x - x0)) + plane[y0, x1] * (x - x0)
            lower = plane[y1, x0] * (1 - (x - x0)) + plane[y1, x1] * (x - x0)
            result[i, j] = upper * (1 - (y - y0)) + lower * (y - y0)
    return result


def rotated(plane: np.ndarray, angle: float) -> np.ndarray:
    """Rotate around the centre, clockwise by a positive angle; outside, pixels are zero."""
    rows, columns = plane.shape
    padded = np.pad(plane, 1)
    result = np.zeros_like(plane)
    for i in range(rows):
        for j in range(columns):
            down, right = i - (rows - 1) / 2, j - (columns - 1) / 2
            y = down * math.cos(angle) + right * math.sin(angle) + (rows - 1) / 2 + 1
            x = right * math.cos(angle) - down * math.sin(angle) + (columns - 1) / 2 + 1
            if not (0 <= y < rows + 1 and 0 <= x < columns + 1):
                continue
            y0, x0 = math.floor(y), math.floor(x)
            upper = padded[y0, x0] * (1 - (x - x0)) + padded[y0, x0 + 1] * (x - x0)
            lower = padded[y0 + 1, x0] * (1 - (x - x0)) + padded[y0 + 1, x0 + 1] * (x - x0)
            result[i, j] = upper * (1 - (y - y0)) + lower * (y - y0)
    return result


def cut_out(planes: np.ndarray, side: int, y: float, x: float) -> None:
    """Set a square to zero. Its centre is a pixel of the image; it is clipped at the border."""
    _, height, width = planes.shape
    top, left = math.floor(y * height) - side // 2, math.floor(x * width) - side // 2
    for row in range(top, top + side):
        for column in range(left, left + side):
            if 0 <= row < height and 0 <= column < width:
                planes[:, row, column] = 0


# --- against the reference

NORMAL = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
TRANSFORMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "normalise": NORMAL,
    "crop": {"crop_padding": 3},
    "flip": {"flip": True},
    "cutout": {**NORMAL, "cutout": 4},
    "cutout of odd side": {**NORMAL, "cutout": 5},
    "cutout of one pixel": {**NORMAL, "cutout": 1},
    "cutout larger than the image": {**NORMAL, "cutout": 30},
    "larger": {"resize": 16},
    "smaller": {"resize": 6},
    "crop, then larger": {"crop_padding": 2, "resize": 13},
    "resized crop": {**NORMAL, "resize": 14, "resized_crop": True},
    "resized crop to fewer pixels": {"resize": 7, "resized_crop": True, "flip": True, "cutout": 2},
    "rotate": {**NORMAL, "rotate": 30},
    "rotate by any angle": {"rotate": 180},
    "jitter": {**NORMAL, "jitter": 0.4},
    "everything": {
        **VARIANTS["inco"]["cifar10"],
        "resize": 12,
        "rotate": 15,
        "jitter": 0.2,
        "cutout": 3,
    },
    "all of the inco variant": {**VARIANTS["inco"]["cifar10"]},
    "all of the inco-vit variant": {**VARIANTS["inco-vit"]["cifar10"], "resize": 20},
}


@pytest.mark.parametrize("shape", [(10, 10), (9, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_batch_equals_the_reference(name: str, shape: tuple[int, int]) -> None:
    given, transform, table = examples(12, *shape), TransformSettings(**TRANSFORMS[name]), draws()
    expected = [
        reference(image, transform, numbers)
        for image, numbers in zip(given.inputs, table, strict=True)
    ]
    np.testing.assert_allclose(batch(given, transform, table), expected, atol=2e-5)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_test_data_and_batches_without_draws_are_not_augmented(name: str) -> None:
    given, transform = examples(), TransformSettings(**TRANSFORMS[name])
    expected = [reference(image, transform) for image in given.inputs]
    for augment, table in ((True, None), (False, draws()), (False, None)):
        np.testing.assert_allclose(batch(given, transform, table, augment), expected, atol=2e-5)


def test_only_training_data_with_a_random_transform_asks_for_draws() -> None:
    given = examples()
    for name, values in TRANSFORMS.items():
        transform = TransformSettings(**values)
        random = name not in ("nothing", "normalise", "larger", "smaller")
        assert device_data(given, transform, CPU, augment=True).random == random
        assert not device_data(given, transform, CPU, augment=False).random


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_have_their_channels_last_in_memory(name: str, channels: int) -> None:
    values = {**TRANSFORMS[name]}
    for key in ("mean", "std"):
        if key in values:
            values[key] = values[key][:channels]
    data = device_data(examples(channels=channels), TransformSettings(**values), CPU, augment=True)
    for table in (None, draws()):
        images, _ = data.batch(torch.arange(12), table)
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("padding", [0, 2])
def test_images_are_stored_as_blocks_of_memory(padding: int) -> None:
    """An array may be a view with its channels moved, and the GPU's kernel reads it as a block."""
    planes = np.random.default_rng(0).integers(0, 256, (12, 3, 10, 10), dtype=np.uint8)
    moved = planes.transpose(0, 2, 3, 1)
    transform = TransformSettings(crop_padding=padding, flip=True)
    both = [
        device_data(
            Examples(images, np.zeros(12, dtype=np.int64)),
            transform,
            torch.device("cpu"),
            augment=True,
        )
        for images in (moved, moved.copy())
    ]
    assert both[0].inputs.is_contiguous()
    rows = torch.arange(12)
    batches = [data.batch(rows, draws())[0] for data in both]
    assert torch.equal(*batches)


@pytest.mark.parametrize("name", ["nothing", "all of the inco variant", "resized crop"])
def test_labels_and_images_follow_the_rows_asked_for(name: str) -> None:
    given, transform, rows = examples(), TransformSettings(**TRANSFORMS[name]), [5, 0, 5, 11]
    data = device_data(given, transform, CPU, augment=True)
    assert len(data) == 12
    for table in (None, draws(4)):
        images, labels = data.batch(torch.tensor(rows), table)
        assert labels.tolist() == given.targets[rows].tolist()
        numbers = table if table is not None else [None] * 4
        expected = [
            reference(given.inputs[row], transform, own)
            for row, own in zip(rows, numbers, strict=True)
        ]
        np.testing.assert_allclose(images.numpy(), expected, atol=2e-5)


def test_each_image_has_its_own_draws() -> None:
    given, table = examples(), draws()
    data = device_data(
        given, TransformSettings(**TRANSFORMS["all of the inco variant"]), CPU, augment=True
    )
    whole, _ = data.batch(torch.arange(12), table)
    for row in range(12):
        alone, _ = data.batch(torch.tensor([row]), table[row : row + 1])
        assert torch.equal(alone[0], whole[row])


def test_the_examples_are_left_as_they_were() -> None:
    given = examples()
    before = given.inputs.copy()
    batch(given, TransformSettings(**TRANSFORMS["all of the inco variant"]), draws())
    assert np.array_equal(given.inputs, before)


# --- by hand


def test_pixels_are_scaled_to_one_and_normalised_by_channel() -> None:
    given = Examples(np.array([[[[0, 51, 255]]]], np.uint8), np.array([4]))
    transform = TransformSettings(mean=(0.5, 0.2, 0.0), std=(0.5, 0.1, 2.0))
    np.testing.assert_allclose(batch(given, transform, None).ravel(), [-1.0, 0.0, 0.5], atol=1e-6)


@pytest.mark.parametrize(("value", "shift"), [(0.0, 2), (0.5, 0), (LARGEST, -2)])
def test_a_crop_moves_the_image_and_fills_with_black(value: float, shift: int) -> None:
    """Draws of 0 keep the upper left corner of the padded image: it moves down and right."""
    given = examples(1, 6, 6)
    image = given.inputs[0].transpose(2, 0, 1) / 255
    expected = np.zeros((3, 6, 6))
    for row in range(6):
        for column in range(6):
            if 0 <= row - shift < 6 and 0 <= column - shift < 6:
                expected[:, row, column] = image[:, row - shift, column - shift]
    np.testing.assert_allclose(
        batch(given, TransformSettings(crop_padding=2), drawn(value))[0], expected, atol=1e-6
    )


def test_padding_is_black_before_normalisation() -> None:
    transform = TransformSettings(crop_padding=2, **NORMAL)  # type: ignore[arg-type]
    corner = batch(examples(1), transform, drawn(0.0))[0, :, 0, 0]
    np.testing.assert_allclose(corner, [-0.4 / 0.2, -0.5 / 0.25, -0.6 / 0.3], atol=1e-5)


def test_all_offsets_of_a_crop_are_equally_likely() -> None:
    given = Examples(np.full((90, 1, 1, 1), 255, np.uint8), np.zeros(90, np.int64))
    table = drawn(0.5, 90)
    table[:, 0] = torch.arange(90) / 90
    white = batch(given, TransformSettings(crop_padding=4), table).ravel()
    assert white.sum() == 10 and np.flatnonzero(white).tolist() == list(range(40, 50))


def test_an_image_is_mirrored_from_one_half_on() -> None:
    given = examples(1)
    image = given.inputs[0].transpose(2, 0, 1) / 255
    flip = TransformSettings(flip=True)
    for number, expected in (
        (0.0, image),
        (0.5 - 2**-25, image),
        (0.5, image[:, :, ::-1]),
        (LARGEST, image[:, :, ::-1]),
    ):
        np.testing.assert_allclose(
            batch(given, flip, drawn(0.0, d4=number))[0], expected, atol=1e-6
        )


@pytest.mark.parametrize(
    ("y", "x", "rows", "columns"),
    [
        (0.0, 0.0, (0, 2), (0, 2)),
        (LARGEST, LARGEST, (7, 10), (7, 10)),
        (0.5, 0.0, (3, 7), (0, 2)),
        (0.2, 0.8, (0, 4), (6, 10)),
    ],
)
def test_a_cutout_is_a_square_around_its_centre_clipped_at_the_border(
    y: float, x: float, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    transform = TransformSettings(cutout=4, **NORMAL)  # type: ignore[arg-type]
    given = Examples(np.full((1, 10, 10, 3), 255, np.uint8), np.array([0]))
    black = batch(given, transform, drawn(0.3, d5=y, d6=x))[0] == 0
    expected = np.zeros((3, 10, 10), bool)
    expected[:, slice(*rows), slice(*columns)] = True
    assert np.array_equal(black, expected)


def test_every_pixel_is_equally_often_the_centre_of_a_cutout() -> None:
    given = Examples(np.full((144, 3, 4, 1), 255, np.uint8), np.zeros(144, np.int64))
    table = drawn(0.0, 144)
    table[:, 5] = (torch.arange(144) // 12 + 0.5) / 12
    table[:, 6] = (torch.arange(144) % 12 + 0.5) / 12
    cut = (batch(given, TransformSettings(cutout=1), table)[:, 0] == 0).sum(axis=0)
    assert cut.tolist() == [[12, 12, 12, 12]] * 3


def test_a_box_of_the_whole_area_is_the_image_itself() -> None:
    given = examples(4)
    transform = TransformSettings(resize=10, resized_crop=True)
    whole = batch(given, transform, drawn(0.3, 4, d0=LARGEST, d1=0.5))
    np.testing.assert_allclose(whole, given.inputs.transpose(0, 3, 1, 2) / 255, atol=1e-4)


def test_a_box_never_leaves_the_image() -> None:
    """On a ramp from 0 to 255 a pixel's value is its position, so border pixels would show."""
    side = 100
    ramp = np.linspace(0, 255, side).round().astype(np.uint8)
    images = np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side))], axis=-1)
    extremes = [0.0, 0.5, LARGEST]
    table = torch.tensor(
        [
            [a, b, c, d, 0, 0, 0]
            for a in extremes
            for b in extremes
            for c in extremes
            for d in extremes
        ]
    )
    given = Examples(np.tile(images, (len(table), 1, 1, 1)), np.zeros(len(table), np.int64))
    crops = batch(given, TransformSettings(resize=50, resized_crop=True), table)
    for numbers, (x, y) in zip(table.tolist(), crops, strict=True):
        left, top, width, height = random_box(*numbers[:4])
        assert (
            left >= -1e-6 and left + width <= 1 + 1e-6 and top >= -1e-6 and top + height <= 1 + 1e-6
        )
        assert 0.05 < width <= 1 and 0.05 < height <= 1
        step_x, step_y = (crop.max() - crop.min() for crop in (x, y))
        assert step_x == pytest.approx(width * 49 / 50, abs=0.02) and step_y == pytest.approx(
            height * 49 / 50, abs=0.02
        )
        assert x[0, 0] == pytest.approx(left + width / 100, abs=0.02)
        assert y[0, 0] == pytest.approx(top + height / 100, abs=0.02)


@pytest.mark.parametrize("value", [0.0, LARGEST])
@pytest.mark.parametrize("padding", [1, 2, 3, 4, 7, 8, 16, 63, 64, 127])
def test_the_extremes_of_a_draw_stay_inside_the_padded_image(padding: int, value: float) -> None:
    given = Examples(np.full((1, 1, 1, 1), 255, np.uint8), np.array([0]))
    data = device_data(given, TransformSettings(crop_padding=padding), CPU, augment=True)
    images, _ = data.batch(torch.tensor([0]), drawn(value))
    assert images.item() == 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 28, 32, 33, 224, 255, 256, 257])
def test_the_largest_draw_puts_a_cutouts_centre_on_the_last_pixel(size: int) -> None:
    given = Examples(np.full((1, size, size, 1), 255, np.uint8), np.array([0]))
    black = batch(given, TransformSettings(cutout=1), drawn(LARGEST))[0, 0] == 0
    assert np.argwhere(black).tolist() == [[size - 1, size - 1]]


# --- settings that do not fit the data


def test_normalisation_for_another_number_of_channels_is_refused() -> None:
    transform = TransformSettings(**NORMAL)  # type: ignore[arg-type]
    with pytest.raises(
        MotleyError, match=r"data\.transform\.mean has 3 values; the images have 1 channels"
    ):
        device_data(examples(channels=1), transform, CPU, augment=True)


#: Data set -> side and channels of its images.
STORED = {
    "digits": (8, 1),
    "fashion-mnist": (28, 1),
    "mnist": (28, 1),
    "femnist": (28, 1),
    "cifar10": (32, 3),
    "cifar100": (32, 3),
    "svhn": (32, 3),
    "cinic10": (32, 3),
}
PAPERS = [(variant, name) for variant, by_data in VARIANTS.items() for name in by_data]


@pytest.mark.parametrize(("variant", "name"), PAPERS)
def test_the_papers_transforms_fit_their_data(variant: str, name: str) -> None:
    settings = [f"data.name={name}", f"data.transform.variant={variant}"]
    transform = load_config(overrides=settings).data.transform
    side, channels = STORED[name]
    data = device_data(examples(2, side, side, channels), transform, CPU, augment=True)
    for table in (None, draws(2)):
        assert tuple(data.batch(torch.arange(2), table)[0].shape[1:]) == tuple(data.shape)
    if variant == "inco-vit":
        assert data.shape == ImageShape(3, 224, 224)


def transform_of(variant: str, name: str) -> TransformSettings:
    settings = [f"data.name={name}", f"data.transform.variant={variant}"]
    return load_config(overrides=settings).data.transform


def test_the_papers_transforms_have_their_published_values() -> None:
    """The constants of facts about the authors' code, written out a second time."""
    half = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    svhn = transform_of("inco", "svhn")
    assert svhn == TransformSettings(variant="inco", cutout=16, **half)  # type: ignore[arg-type]
    cinic10 = transform_of("inco", "cinic10")
    assert (cinic10.crop_padding, cinic10.flip, cinic10.cutout) == (4, True, 0)
    assert cinic10.mean == (0.4789, 0.4723, 0.4305) and cinic10.std == (0.2421, 0.2383, 0.2587)
    cifar100 = transform_of("fedimpro", "cifar100")
    assert (cifar100.crop_padding, cifar100.flip, cifar100.cutout) == (4, True, 16)
    assert cifar100.mean == (0.5071, 0.4865, 0.4409) and cifar100.std == (0.2673, 0.2564, 0.2762)
    for name in ("svhn", "femnist"):
        assert transform_of("fedimpro", name) == TransformSettings(variant="fedimpro")
    for name in ("cifar10", "cinic10", "svhn"):
        vit = TransformSettings(
            variant="inco-vit", resize=224, resized_crop=True, flip=True, **half
        )  # type: ignore[arg-type]
        assert transform_of("inco-vit", name) == vit
    fashion = transform_of("inco-vit", "fashion-mnist")
    assert fashion == TransformSettings(variant="inco-vit", resize=224, channels=3)


def test_a_variant_without_values_for_the_data_set_names_those_that_have_some() -> None:
    with pytest.raises(MotleyError, match=r"is defined for .*cinic10.*, not for 'cifar100'"):
        transform_of("inco", "cifar100")


# --- copies of the grey channel


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2)},
        {"resize": 14, "crop_padding": 2, "flip": True, "cutout": 4},
        {"resize": 20, "resized_crop": True, "flip": True},
    ],
)
def test_grey_images_are_copied_to_three_channels(values: dict[str, Any]) -> None:
    """The copies must equal the transform of images that were stored three times."""
    grey = examples(12, channels=1)
    stacked = Examples(np.repeat(grey.inputs, 3, axis=3), grey.targets)
    for table in (None, draws()):
        copied = batch(grey, TransformSettings(channels=3, **values), table)
        assert copied.shape[1] == 3
        assert np.array_equal(copied, batch(stacked, TransformSettings(**values), table))


def test_copies_are_only_made_of_grey_images() -> None:
    with pytest.raises(
        MotleyError, match=r"data\.transform\.channels = 1: only grey images .* have 3 channels"
    ):
        device_data(examples(channels=3), TransformSettings(channels=1), CPU, augment=True)
    colour = device_data(examples(channels=3), TransformSettings(channels=3), CPU, augment=True)
    assert colour.shape == ImageShape(3, 10, 10)


def test_a_federation_trains_on_copies() -> None:
    federation = Federation(tiny_config("data.transform.channels=3", "training.rounds=1"))
    server, _ = federation.run_round(federation.initial_state())
    assert server.state["conv1.weight"].shape[1] == 3
