"""Fashion-MNIST in its released form: four IDX files, compressed with gzip or not.

An IDX file consists of two zero bytes, a type byte (8 = unsigned bytes), the number of dimensions,
each dimension as a big-endian 32-bit number, and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, find_files

#: Limit on the decompressed size, because a small gzip file can expand to many gigabytes of zeros.
#: The largest real file has 47 MB.
MAX_BYTES = 200_000_000
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@DATASETS.register(
    "fashion-mnist",
    "60,000 + 10,000 pictures of clothes, 28x28 grey, 10 classes; the released IDX files",
    paper="Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747",
)
def load(source: DataSource) -> Dataset:
    """Read the four files.

    They may be in the root, in its `fashion-mnist` folder or in torchvision's `FashionMNIST/raw`.
    """
    source.refuse_path("fashion-mnist")
    folders = [source.root, source.root / "fashion-mnist", source.root / "FashionMNIST" / "raw"]
    paths = find_files("fashion-mnist", source, folders, FILES, endings=("", ".gz"))
    train_images, train_labels, test_images, test_labels = paths
    train = _examples(train_images, train_labels)
    test = _examples(test_images, test_labels)
    return Dataset("fashion-mnist", train, test, classes=10)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the unsigned bytes of an IDX file that must have `dims` dimensions."""
    raw = _read_decompressed(path)
    header = 4 + 4 * dims
    magic = bytes([0, 0, 8, dims])
    if raw[:4] != magic:
        raise MotleyError(
            f"{path} is not an IDX file of unsigned bytes with {dims} dimensions: "
            f"it starts with {raw[:4].hex(' ') or 'nothing'}, not {magic.hex(' ')}."
        )
    if len(raw) < header:
        raise MotleyError(f"{path} is truncated: it ends inside its header.")
    shape = struct.unpack(f">{dims}I", raw[4:header])
    expected, actual = math.prod(shape), len(raw) - header
    if actual != expected:
        problem = "is truncated" if actual < expected else "has extra bytes"
        raise MotleyError(
            f"{path} {problem}: shape {shape} needs {expected} values and it holds {actual}."
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()


def _read_decompressed(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from error
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    if len(raw) > MAX_BYTES:
        raise MotleyError(
            f"{path} holds more than {MAX_BYTES:,} bytes, which no file of Fashion-MNIST does."
        )
    return raw


def _examples(images: Path, labels: Path) -> Examples:
    return Examples(read_idx(images, 3)[..., np.newaxis], read_idx(labels, 1).astype(np.int64))
