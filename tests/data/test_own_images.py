"""The user's own images in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from motley.core.errors import MotleyError
from motley.data.files.reading import Reading, read_files
from motley.data.files.settings import FileSettings
from motley.models.inputs import ImageShape


def save(path: Path, value: int = 100, size: tuple[int, int] = (6, 5), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "1") else (value,) * len(mode)).save(path)


def read(path: Path, **settings: Any) -> Reading:
    return read_files(path, FileSettings(**settings))


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(MotleyError) as caught:
        read(path, **settings)
    return str(caught.value)


def test_one_folder_per_class(tmp_path: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        for i in range(10):
            save(tmp_path / name / f"{i}.png", 100 * label + i)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    save(tmp_path / ".cache" / "x.png")
    reading = read(tmp_path)
    data = reading.dataset
    assert reading.format == "images" and reading.held_out
    assert data.shape == ImageShape(3, 5, 6) and data.class_names == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (16, 4)
    assert np.bincount(data.test.targets).tolist() == [2, 2]
    assert (data.train.inputs[:, 0, 0, 0] // 100 == data.train.targets).all()
    assert reading.notes == ("files that are not images are ignored: 1",)


def test_train_and_test_folders_with_mixed_formats_and_colours(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a" / "1.png", mode="L")
    save(tmp_path / "train" / "b" / "2.JPG", mode="RGB")
    save(tmp_path / "train" / "b" / "3.webp", mode="RGBA")
    save(tmp_path / "test" / "b" / "4.bmp", mode="L")
    data = read(tmp_path).dataset
    assert data.shape == ImageShape(3, 5, 6) and len(data.test) == 1
    assert data.test.targets.tolist() == [1]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
            save(path.with_suffix(".png"), mode="L")
    assert read(tmp_path).dataset.shape == ImageShape(1, 5, 6)


def test_one_folder_per_client(tmp_path: Path) -> None:
    for client in ("10", "9", "ann"):
        for name in ("x", "y"):
            for i in range(5):
                save(tmp_path / client / name / f"{i}.png")
    reading = read(tmp_path)
    clients = reading.dataset.train.clients
    assert reading.client_names == ("10", "9", "ann")
    assert clients is not None and np.bincount(clients).tolist() == [8, 8, 8]


def test_sizes_that_differ_are_scaled_or_refused_with_both_files(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", size=(4, 8))
    save(tmp_path / "a" / "2.png", size=(4, 8))
    save(tmp_path / "b" / "3.png", size=(8, 4))
    save(tmp_path / "b" / "4.png", size=(9, 9))
    message = refused(tmp_path)
    assert f"{tmp_path / 'b' / '3.png'} has 8 x 4 pixels and {tmp_path / 'a' / '1.png'} 4 x 8" in (
        message
    )
    assert read(tmp_path, resize=7, test_fraction=0.5).dataset.shape == ImageShape(3, 7, 7)


def test_folders_that_cannot_be_understood(tmp_path: Path) -> None:
    assert "there are no images" in refused(tmp_path)
    assert "there is no file or folder" in refused(tmp_path / "absent")
    save(tmp_path / "a" / "1.png")
    assert "only one class" in refused(tmp_path)
    save(tmp_path / "b" / "c" / "1.png")
    assert "must all be in folders CLASS, or all in CLIENT/CLASS" in refused(tmp_path)
    save(tmp_path / "flat" / "1.png")
    assert "in a folder per class" in refused(tmp_path / "flat")
    save(tmp_path / "half" / "test" / "a" / "1.png")
    assert "none called 'train'" in refused(tmp_path / "half")
    save(tmp_path / "half" / "train" / "b" / "1.png")
    save(tmp_path / "half" / "train" / "c" / "1.png")
    assert "the label 'a' of the test part is not one of" in refused(tmp_path / "half")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "2.png is empty"),
        (b"not an image", "2.png is damaged, or no image"),
        (b"GIF89a" + bytes(20), "2.png is damaged, or no image"),
    ],
)
def test_a_damaged_image_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    for name in ("1", "3", "4"):
        save(tmp_path / "a" / f"{name}.png")
        save(tmp_path / "b" / f"{name}.png")
    (tmp_path / "b" / "2.png").write_bytes(content)
    assert message in refused(tmp_path)
    whole = (tmp_path / "b" / "1.png").read_bytes()
    (tmp_path / "b" / "2.png").write_bytes(whole[:-30])
    assert "2.png is damaged" in refused(tmp_path)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png")
    path = tmp_path / "b" / "2.png"
    path.parent.mkdir()
    Image.fromarray(np.zeros((5, 6), np.uint16)).save(path)
    assert "2.png has pixels of the type 'I;16'; save it with 8 bits" in refused(tmp_path)
