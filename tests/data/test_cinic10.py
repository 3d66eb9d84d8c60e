"""The reader of CINIC-10, on small folders in the released form, and on files that are no images."""

from __future__ import annotations

import io
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets.cinic10 import CLASSES, MAX_BYTES
from motley.models import ImageShape

Image = pytest.importorskip("PIL.Image", reason="needs the extra 'data' (Pillow)")
PngInfo = pytest.importorskip("PIL.PngImagePlugin").PngInfo

RNG = np.random.default_rng(0)


def png(array: np.ndarray | None = None, **options: Any) -> bytes:
    content = io.BytesIO()
    if array is None:
        array = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(array).save(content, "PNG", **options)
    return content.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a data root with two training images and one test image per class."""
    for part, count in (("train", 2), ("valid", 1), ("test", 1)):
        for name in CLASSES:
            folder = tmp_path / "cinic-10" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"n0{number}_{number}.png").write_bytes(png())
    return tmp_path


def test_train_and_test_are_read_in_the_order_of_classes_and_names(root: Path) -> None:
    first = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    (root / "cinic-10" / "train" / "bird" / "cifar10-test-7.png").write_bytes(png(first))
    data = load_dataset("cinic10", root=root)
    assert (data.classes, data.shape) == (10, ImageShape(3, 32, 32))
    assert data.train.targets.tolist() == sorted([*range(10), *range(10), 2])
    assert data.test.targets.tolist() == list(range(10))
    assert np.array_equal(data.train.inputs[4], first)  # "cifar10-..." is before "n0..."


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
def test_grey_and_indexed_images_become_rgb(mode: str, root: Path) -> None:
    image = Image.fromarray(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)).convert(mode)
    path = root / "cinic-10" / "test" / "airplane" / "n00_0.png"
    image.save(path)
    data = load_dataset("cinic10", root=root)
    assert np.array_equal(data.test.inputs[0], np.asarray(image.convert("RGB")))


def test_other_files_in_the_folders_do_no_harm(root: Path) -> None:
    (root / "cinic-10" / "train" / "bird" / "README").write_text("text")
    (root / "cinic-10" / "train" / ".cache").mkdir()
    (root / "cinic-10" / "README.txt").write_text("text")
    assert len(load_dataset("cinic10", root=root).train) == 20


def chunk(name: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + checksum


def announced(width: int, height: int, pixels: bytes = b"") -> bytes:
    """Return a PNG file whose header announces a size that its pixels need not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def gif() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (32, 32)).save(content, "GIF")
    return content.getvalue()


def with_text(length: int) -> bytes:
    info = PngInfo()
    info.add_text("note", "x" * length, zip=True)
    return png(pnginfo=info)


HOSTILE = {
    "empty": (b"", "is not a PNG image, or is damaged"),
    "text": (b"this is no image", "is not a PNG image"),
    "another format": (gif(), "is not a PNG image"),
    "truncated": (png()[:700], "or is damaged"),
    "changed": (png()[:60] + b"\0\0\0\0" + png()[64:], "or is damaged"),
    "too small": (png(np.zeros((31, 32, 3), np.uint8)), "32 x 32 pixels, not 32 x 31"),
    "absurd size": (announced(2**31 - 1, 2**31 - 1), "n00_0.png"),
    "large size": (announced(30_000, 30_000), "n00_0.png"),
    "few pixels": (announced(32, 32, b"\0" * 50), "or is damaged"),
    "a bomb of text": (with_text(80_000_000), "or is damaged"),
    "a large file": (png() + bytes(MAX_BYTES), "bytes; an image of CINIC-10 has at most 100,000"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_are_no_images_are_refused(name: str, root: Path) -> None:
    content, message = HOSTILE[name]
    path = root / "cinic-10" / "train" / "dog" / "n00_0.png"
    path.write_bytes(content)
    with pytest.raises(MotleyError, match=message) as caught:
        load_dataset("cinic10", root=root)
    assert str(path) in str(caught.value)


def test_a_pipe_is_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "cinic-10" / "train" / "dog" / "a.png")
    with pytest.raises(MotleyError, match=r"a\.png is not a regular file"):
        load_dataset("cinic10", root=root)


def test_classes_that_are_missing_empty_or_unknown_are_named(root: Path) -> None:
    part = root / "cinic-10" / "test"
    (part / "zebra").mkdir()
    with pytest.raises(MotleyError, match="zebra: 'zebra' is no class of CINIC-10"):
        load_dataset("cinic10", root=root)
    (part / "zebra").rmdir()
    (part / "cat" / "n00_0.png").unlink()
    with pytest.raises(MotleyError, match="cat: there are no PNG images in it"):
        load_dataset("cinic10", root=root)
    (part / "cat").rmdir()
    with pytest.raises(MotleyError, match="test: there is no folder for the class 'cat'"):
        load_dataset("cinic10", root=root)


def test_the_extra_is_named_if_pillow_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MotleyError, match=r"^data set 'cinic10' needs PIL, .*'\.\[data\]'$"):
        load_dataset("cinic10", root=root)
