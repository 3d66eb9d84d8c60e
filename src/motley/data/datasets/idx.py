"""The IDX files of MNIST and Fashion-MNIST, compressed with gzip or not.

An IDX file consists of two zero bytes, a type byte (8 = unsigned bytes, 12 = 32-bit integers), the
number of dimensions, each dimension as a big-endian 32-bit number, and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, Examples, FileLayout, make_examples

#: Limit on the declared size. A small gzip file can expand to many gigabytes of zeros, so no more
#: is decompressed than the header declares. The largest real file has 47 MB.
MAX_BYTES = 200_000_000
SIDE = 28
CLASSES = 10
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_idx_files(layout: FileLayout, root: Path) -> Dataset:
    """Read the four files of MNIST or of a data set in its format."""
    train_images, train_labels, test_images, test_labels = layout.find(root)
    train = _examples(train_images, train_labels)
    test = _examples(test_images, test_labels)
    return Dataset(layout.name, train, test, classes=CLASSES)


def _examples(image_file: Path, label_file: Path) -> Examples:
    images = read_idx(image_file, 3)
    if images.shape[1:] != (SIDE, SIDE):
        raise MotleyError(
            f"{image_file}: images must have {SIDE} x {SIDE} pixels, "
            f"not {images.shape[1]} x {images.shape[2]}."
        )
    labels = read_idx(label_file, 1)
    if len(images) != len(labels):
        raise MotleyError(
            f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels."
        )
    return make_examples(images[..., np.newaxis], labels, CLASSES, label_file)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the unsigned bytes of an IDX file that must have `dims` dimensions."""
    return _read_values(path, dims, 8, np.dtype(np.uint8), "unsigned bytes")


def read_idx_ints(path: Path, dims: int) -> np.ndarray:
    """Return the 32-bit integers of an IDX file that must have `dims` dimensions."""
    return _read_values(path, dims, 12, np.dtype(">i4"), "32-bit integers")


def _read_values(path: Path, dims: int, code: int, dtype: np.dtype, values: str) -> np.ndarray:
    magic = bytes([0, 0, code, dims])
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            shape = _read_shape(file, magic, values, path)
            expected = math.prod(shape) * dtype.itemsize
            if expected > MAX_BYTES:
                raise MotleyError(
                    f"{path} is truncated or damaged: it declares the shape {shape}, more than the "
                    f"{MAX_BYTES:,} bytes that a file of this data set can have."
                )
            # One byte more shows that there are too many; the rest of them is not decompressed.
            raw = file.read(expected + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from error
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    if len(raw) < expected:
        raise MotleyError(
            f"{path} is truncated: shape {shape} needs {expected} bytes and it holds {len(raw)}."
        )
    if len(raw) > expected:
        raise MotleyError(f"{path} has extra bytes: shape {shape} needs {expected} bytes.")
    array = np.frombuffer(raw, dtype).reshape(shape)
    # A copy in the machine's byte order, which can be written to.
    return array.astype(dtype.newbyteorder("="))


def _read_shape(file: BufferedIOBase, magic: bytes, values: str, path: Path) -> tuple[int, ...]:
    dims = magic[3]
    start = file.read(len(magic))
    if start != magic:
        raise MotleyError(
            f"{path} is not an IDX file of {values} with {dims} dimensions: "
            f"it starts with {start.hex(' ') or 'nothing'}, not {magic.hex(' ')}."
        )
    lengths = file.read(4 * dims)
    if len(lengths) < 4 * dims:
        raise MotleyError(f"{path} is truncated: it ends inside its header.")
    return struct.unpack(f">{dims}I", lengths)
