"""Image files: one folder per class, and optionally one per client above it.

- ROOT/CLASS/*.png: a fraction of the images is held out for testing.
- ROOT/CLIENT/CLASS/*.png: the same, and each client has a folder.
- ROOT/train/... and ROOT/test/...: either of these in both parts.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.opening import MAX_ROWS
from motley.extras import require
from motley.limits import check_expansion

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
#: Modes of Pillow that are stored as grey values, and as colours. Transparency is dropped.
GREY_MODES = frozenset({"1", "L", "LA"})
COLOUR_MODES = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
#: A file of a few kilobytes can announce billions of pixels.
MAX_PIXELS = 50_000_000
MAX_FILE_BYTES = 200_000_000
#: train/CLIENT/CLASS/file.
MAX_DEPTH = 4


@dataclass(frozen=True)
class ImageFile:
    """An image file with the names of its class and of its client ("" if there are none)."""

    path: Path
    label: str
    client: str


@dataclass(frozen=True, eq=False)
class ImageListing:
    """The image files of a folder."""

    train: list[ImageFile]
    #: None if the folder has no test part.
    test: list[ImageFile] | None
    has_clients: bool
    #: Files that are not images, which are not read.
    ignored: int


def has_images(folder: Path) -> bool:
    """Tell whether a folder has image files, at any depth that is read."""
    listed, _ = _find(folder, MAX_DEPTH)
    return bool(listed)


def list_images(root: Path, test_root: Path | None = None) -> ImageListing:
    """List a folder's images. `test_root` is another folder with the test images."""
    if not root.is_dir():
        raise MotleyError(f"{root} is not a folder; images are read from one folder per class.")
    train_folder = _first_folder(root, TRAIN_FOLDERS)
    test_folder = test_root or (train_folder and _first_folder(root, TEST_FOLDERS))
    if train_folder is None and _first_folder(root, TEST_FOLDERS) is not None:
        raise MotleyError(f"{root} has a folder for tests but none called 'train'.")
    if test_root is not None and not test_root.is_dir():
        raise MotleyError(f"data.files.test: {test_root} is not a folder.")
    train, has_clients, ignored = _list_part(train_folder or root)
    if test_folder is None:
        return ImageListing(train, None, has_clients, ignored)
    test, test_clients, test_ignored = _list_part(test_folder)
    if test_clients != has_clients:
        raise MotleyError(
            f"{train_folder or root} and {test_folder} must both have folders CLIENT/CLASS, or "
            "both folders CLASS."
        )
    return ImageListing(train, test, has_clients, ignored + test_ignored)


def _first_folder(root: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        if (root / name).is_dir():
            return root / name
    return None


def _list_part(folder: Path) -> tuple[list[ImageFile], bool, int]:
    """Return the images below a folder, whether clients have folders, and the ignored files."""
    paths, ignored = _find(folder, MAX_DEPTH - 1)
    if not paths:
        endings = ", ".join(sorted(ENDINGS))
        raise MotleyError(f"{folder}: there are no images in it (files ending in {endings}).")
    depths: dict[int, Path] = {}
    for path in paths:
        depths.setdefault(len(path.relative_to(folder).parts), path)
    if len(depths) > 1:
        first, second = list(depths.values())[:2]
        raise MotleyError(
            f"{folder}: images must all be in folders CLASS, or all in CLIENT/CLASS, but there are "
            f"{first} and {second}."
        )
    depth = next(iter(depths))
    if depth not in (2, 3):
        raise MotleyError(
            f"{paths[0]}: images must be in a folder per class, or in CLIENT/CLASS, below {folder}."
        )
    images = []
    for path in paths:
        names = path.relative_to(folder).parts
        client = names[0] if depth == 3 else ""
        images.append(ImageFile(path, names[-2].strip(), client))
    return images, depth == 3, ignored


def _find(folder: Path, depth: int) -> tuple[list[Path], int]:
    """Return the image files below a folder, sorted, and the number of other files."""
    paths: list[Path] = []
    ignored = 0
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise MotleyError(f"{folder} cannot be read: {error}.") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if depth > 1:
                inner, inner_ignored = _find(entry, depth - 1)
                paths += inner
                ignored += inner_ignored
        elif entry.suffix.lower() in ENDINGS:
            paths.append(entry)
        else:
            ignored += 1
    if len(paths) > MAX_ROWS:
        raise MotleyError(f"{folder} has more than {MAX_ROWS:,} images.")
    return paths, ignored


def read_image_files(images: Sequence[ImageFile], resize: int) -> np.ndarray:
    """Return decoded image files as one array (N, height, width, channels)."""
    paths = [image.path for image in images]

    def source(index: int) -> Path:
        return paths[index]

    return decode_images(len(paths), source, lambda index: str(paths[index]), resize)


def decode_images(
    count: int,
    source: Callable[[int], Path | bytes],
    where: Callable[[int], str],
    resize: int,
) -> np.ndarray:
    """Decode images into one uint8 array (N, height, width, channels): grey if all of them are.

    Images of different sizes are scaled to `resize` pixels on each side, or refused if it is 0. The
    headers are read first, so that the memory is checked before any image is decoded.
    """
    require("PIL", "reading images")
    first_size = (0, 0)
    is_grey = True
    stored = 0
    for index in range(count):
        stored += _stored_bytes(source(index), where(index))
        size, mode = _header(source(index), where(index))
        if not first_size[0]:
            first_size = size
        if size != first_size and not resize:
            raise MotleyError(
                f"{where(index)} has {size[0]} x {size[1]} pixels and {where(0)} "
                f"{first_size[0]} x {first_size[1]}. Set data.files.resize to the side that all "
                "images are scaled to."
            )
        is_grey = is_grey and mode in GREY_MODES
    channels = 1 if is_grey else 3
    width, height = (resize, resize) if resize else first_size
    shape = (count, height, width, channels)
    needed = count * height * width * channels
    check_expansion(f"{where(0)} and the other images, of shape {shape},", stored, needed)
    pixels = np.empty(shape, dtype=np.uint8)
    for index in range(count):
        image = _decode(source(index), where(index), "L" if is_grey else "RGB", (width, height))
        pixels[index] = image.reshape(shape[1:])
    return pixels


def _stored_bytes(source: Path | bytes, where: str) -> int:
    """Return the size of an image file, after checking it."""
    try:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
    except OSError as error:
        raise MotleyError(f"{where} cannot be read: {error}.") from None
    if not size:
        raise MotleyError(f"{where} is empty.")
    if size > MAX_FILE_BYTES:
        raise MotleyError(f"{where} has {size:,} bytes; images have at most {MAX_FILE_BYTES:,}.")
    return size


def _open(source: Path | bytes) -> Image.Image:
    from PIL import Image

    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def _header(source: Path | bytes, where: str) -> tuple[tuple[int, int], str]:
    """Return an image's width and height and its mode, without decoding its pixels."""

    def read(image: Image.Image) -> tuple[tuple[int, int], str]:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise MotleyError(
                f"{where} has {width} x {height} pixels; images have at most {MAX_PIXELS:,}."
            )
        if image.mode not in GREY_MODES | COLOUR_MODES:
            raise MotleyError(
                f"{where} has pixels of the type {image.mode!r}; save it with 8 bits per channel."
            )
        return (width, height), image.mode

    return _with_image(source, where, read)


def _decode(source: Path | bytes, where: str, mode: str, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    def read(image: Image.Image) -> np.ndarray:
        converted = image.convert(mode)
        if converted.size != size:
            converted = converted.resize(size, Image.Resampling.BILINEAR)
        return np.asarray(converted)

    return _with_image(source, where, read)


def _with_image(source: Path | bytes, where: str, read: Callable[[Image.Image], T]) -> T:
    """Open an image, call `read` with it, and turn Pillow's exceptions into messages."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata; the pixels are checked
            with _open(source) as image:
                return read(image)
    except (
        OSError,
        SyntaxError,  # Pillow's exception for damaged PNG files
        ValueError,
        TypeError,
        EOFError,
        IndexError,
        KeyError,
        OverflowError,
        RuntimeError,
        Image.DecompressionBombError,
    ) as error:
        formats = ", ".join(FORMATS)
        raise MotleyError(
            f"{where} is damaged, or no image of the formats {formats}: {error}."
        ) from None
