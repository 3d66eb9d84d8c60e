"""The reader of SVHN, on small MATLAB files that scipy writes, and on damaged and hostile ones."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets import svhn
from motley.data.datasets.mat5 import read_mat5
from motley.models import ImageShape

RNG = np.random.default_rng(0)


def pixels(count: int) -> np.ndarray:
    return RNG.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)


def column(*labels: float) -> np.ndarray:
    return np.array(labels, dtype=np.uint8)[:, np.newaxis]


def save(path: Path, compressed: bool = True, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"X": pixels(3), "y": column(1, 10, 9), **changes}
    savemat(path, arrays, do_compression=compressed)
    return path


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("folder", ["svhn", "SVHN", "."])
def test_images_and_labels_are_read(folder: str, compressed: bool, tmp_path: Path) -> None:
    x = pixels(3)
    save(tmp_path / folder / "train_32x32.mat", compressed, X=x)
    save(tmp_path / folder / "test_32x32.mat", compressed, y=column(3, 3, 10))
    data = load_dataset("svhn", root=tmp_path)
    assert (data.classes, data.shape) == (10, ImageShape(3, 32, 32))
    assert data.train.targets.tolist() == [1, 0, 9]  # 10 stands for the digit 0
    assert data.test.targets.tolist() == [3, 3, 0]
    for number in range(3):
        assert np.array_equal(data.train.inputs[number], x[..., number])
    assert data.train.inputs.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float64])
def test_labels_of_any_type_of_number_are_read(dtype: type, tmp_path: Path) -> None:
    path = save(tmp_path / "train_32x32.mat", y=column(2, 10, 7).astype(dtype))
    assert svhn.read_file(path).targets.tolist() == [2, 0, 7]


def test_labels_in_a_row_and_other_variables_do_no_harm(tmp_path: Path) -> None:
    other = {"note": "text", "cells": np.array([1, "a"], dtype=object), "nested": {"a": 1}}
    path = save(tmp_path / "train_32x32.mat", y=column(2, 10, 7).T, **other)
    assert svhn.read_file(path).targets.tolist() == [2, 0, 7]


def test_a_file_in_the_other_byte_order_is_read(tmp_path: Path) -> None:
    def element(number: int, content: bytes) -> bytes:
        return struct.pack(">II", number, len(content)) + content + bytes(-len(content) % 8)

    body = element(6, struct.pack(">II", 11, 0)) + element(5, struct.pack(">ii", 2, 1))
    body += element(1, b"y") + element(4, struct.pack(">HH", 258, 7))
    path = tmp_path / "big.mat"
    path.write_bytes(bytes(124) + struct.pack(">H", 0x0100) + b"MI" + element(14, body))
    assert read_mat5(path, ["y"], 10_000)["y"].tolist() == [[258], [7]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": column(1, 2, 11)}, "labels go from 1 to 11; .* from 1 to 10"),
        ({"y": column(0, 2, 3)}, "labels go from 0 to 3"),
        ({"y": column(1, 2, 3) + 0.5}, "labels go from 1.5 to 3.5; they must be whole numbers"),
        ({"y": np.array([[1.0], [np.nan], [2.0]])}, "labels go from nan"),
        ({"y": column(1, 2)}, "there are 3 images but 2 labels"),
        ({"y": np.ones((3, 3), np.uint8)}, r"y must have shape \(N, 1\), not \(3, 3\)"),
        ({"X": pixels(3)[:30]}, r"X must be uint8 .* not uint8 of shape \(30, 32, 3, 3\)"),
        ({"X": pixels(3).transpose(3, 0, 1, 2)}, r"not uint8 of shape \(3, 32, 32, 3\)"),
        ({"X": pixels(3) / 255}, "not float64"),
        ({"X": pixels(3) * 1j}, "has no array of numbers named X"),
        ({"X": "text"}, "has no array of numbers named X"),
        ({"X": {"a": pixels(3)}}, "has no array of numbers named X"),
    ],
)
def test_wrong_arrays_are_named_with_the_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "train_32x32.mat", **changes)
    with pytest.raises(MotleyError, match=message) as caught:
        svhn.read_file(path)
    assert str(path) in str(caught.value)


def header(version: int = 0x0100) -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", version) + b"IM"


def array(dims: tuple[int, ...], values: bytes, announced: int | None = None) -> bytes:
    """Return an uncompressed array X, whose values may announce another number of bytes."""
    body = struct.pack("<IIII", 6, 8, 9, 0)
    body += struct.pack("<II", 5, 4 * len(dims)) + struct.pack(f"<{len(dims)}i", *dims)
    body += bytes(-len(dims) * 4 % 8) + struct.pack("<HHcxxx", 1, 1, b"X")
    body += struct.pack("<II", 2, len(values) if announced is None else announced) + values
    return struct.pack("<II", 14, len(body)) + body


def compressed(content: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends inside its header"),
        (b"not a MATLAB file" * 20, "does not have the header of a MATLAB file"),
        (header(0x0200), "version 7.3"),
        (header(0x4242), "its version is 0x4242"),
        (header(), "has no array of numbers named X"),
        (header() + b"\x0f", "ends too early"),
        (header() + array((2, 2), b"abcd")[:40], "ends too early"),
        (header() + compressed(array((2, 2), b"abcd"))[:-8], "ends too early"),
        (header() + struct.pack("<II", 15, 8) + b"garbage!", "truncated or damaged"),
        (header() + array((2, 2), b"abcd", 2**32 - 1), "ends too early"),
        (header() + array((2**31 - 1,) * 4, b"abcd"), "does not match its 4 bytes"),
        (header() + array((-2, -2), b"abcd"), "does not match its 4 bytes"),
        (header() + array((2,), b"ab"), "no plain dimensions"),
        (header() + array((1,) * 9, b"a"), "no plain dimensions"),
        (header() + compressed(bytes(5_000_000)), "expands to more than 1,000,000 bytes"),
        (header() + compressed(array((2, 2), b"abcd"))[:8] + compressed(b"x"), "damaged"),
    ],
)
def test_damaged_and_hostile_files_are_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(content)
    with pytest.raises(MotleyError, match=message) as caught:
        read_mat5(path, ["X"], 1_000_000)
    assert str(path) in str(caught.value)


def test_a_plain_array_is_read_whatever_its_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    for content in (array((2, 3), b"abcdef"), compressed(array((2, 3), b"abcdef"))):
        path.write_bytes(header() + content)
        assert read_mat5(path, ["X"], 10_000)["X"].tolist() == [[97, 99, 101], [98, 100, 102]]


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "train_32x32.mat", X=np.zeros((32, 32, 3, 3), np.uint8))
    content = path.read_bytes()
    for length in range(0, len(content) - 1, 3):
        path.write_bytes(content[:length])
        with pytest.raises(MotleyError, match="train_32x32"):
            svhn.read_file(path)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "train_32x32.mat")
    monkeypatch.setattr(svhn, "MAX_BYTES", 99)
    with pytest.raises(MotleyError, match="at most 99"):
        svhn.read_file(path)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but a MotleyError may come out of a damaged file."""
    random = np.random.default_rng(0)
    path = save(tmp_path / "train_32x32.mat", compressed=False)
    content = path.read_bytes()
    headers = [*range(116, 220), *range(len(content) - 80, len(content))]
    for _ in range(400):
        mutated = bytearray(content)
        for place in random.choice(headers, 3):
            mutated[place] = random.integers(0, 256)
        path.write_bytes(mutated)
        try:
            svhn.read_file(path)
        except MotleyError as error:
            assert str(path) in str(error)
