"""MNIST and Fashion-MNIST: files that do not fit together, or that hold something else."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets.idx import FILES
from motley.models import ImageShape

RNG = np.random.default_rng(0)


def idx(array: np.ndarray, shape: tuple[int, ...] = ()) -> bytes:
    """Return an array as an IDX file, whose header may announce another shape."""
    announced = shape or array.shape
    header = bytes([0, 0, 8, len(announced)]) + struct.pack(f">{len(announced)}I", *announced)
    return header + array.tobytes()


def pixels(count: int, side: int = 28) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side), dtype=np.uint8)


def digits(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8) % 10


def write(folder: Path, **changes: bytes) -> Path:
    """Write four small files; `changes` replaces some by their first word, such as "t10k_labels"."""
    folder.mkdir(parents=True)
    contents = [idx(pixels(12)), idx(digits(12)), idx(pixels(5)), idx(digits(5))]
    keys = ["train_images", "train_labels", "test_images", "test_labels"]
    for file, key, content in zip(FILES, keys, contents, strict=True):
        (folder / f"{file}.gz").write_bytes(gzip.compress(changes.get(key, content)))
    return folder


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_is_read(folder: str, tmp_path: Path) -> None:
    images = pixels(12)
    write(tmp_path / folder, train_images=idx(images))
    data = load_dataset("mnist", root=tmp_path)
    assert (data.name, data.shape, data.classes) == ("mnist", ImageShape(1, 28, 28), 10)
    assert np.array_equal(data.train.inputs[..., 0], images)
    assert data.test.targets.tolist() == [0, 1, 2, 3, 4]


def test_mnist_is_not_looked_for_where_fashion_mnist_may_be(tmp_path: Path) -> None:
    """The files of both have the same names."""
    write(tmp_path / "data")
    assert load_dataset("fashion-mnist", root=tmp_path / "data").name == "fashion-mnist"
    with pytest.raises(MotleyError, match="data set 'mnist' was not found"):
        load_dataset("mnist", root=tmp_path / "data")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("train_labels", idx(digits(11)), "has 12 images, but .*labels.* has 11 labels"),
        ("test_labels", idx(np.full(5, 10, np.uint8)), "t10k-labels.*: labels go from 10 to 10"),
        ("train_images", idx(pixels(12, 32)), "train-images.*: .* 28 x 28 pixels, not 32 x 32"),
        ("train_images", idx(digits(12)), "train-images.* with 3 dimensions"),
        ("test_images", idx(pixels(5))[:-9], "t10k-images.* is truncated"),
        (
            "test_images",
            idx(pixels(5), (2**32 - 1,) * 3),
            "declares the shape .* more than the 200,0",
        ),
        ("test_images", idx(pixels(0)) + b"", "images, but"),
    ],
)
def test_wrong_files_are_named_with_the_reason(
    name: str, key: str, content: bytes, message: str, tmp_path: Path
) -> None:
    write(tmp_path / name, **{key: content})
    with pytest.raises(MotleyError, match=message):
        load_dataset(name, root=tmp_path)
