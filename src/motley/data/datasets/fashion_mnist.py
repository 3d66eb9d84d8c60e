"""Fashion-MNIST in its released form: four IDX files, packed with gzip or not.

An IDX file is two zero bytes, a type byte (8 = unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit number, and then the values.
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

MAX_BYTES = 200_000_000
"""The largest file, unpacked, has 47 MB. A small gzip file can hold many gigabytes of zeros."""
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@DATASETS.register(
    "fashion-mnist",
    "60,000 + 10,000 pictures of clothes, 28x28 grey, 10 classes; the released IDX files",
    paper="Xiao, Rasul, Vollgraf 2017, arXiv:1708.07747",
)
def load(source: DataSource) -> Dataset:
    """Read the four files from the root, its `fashion-mnist` folder or torchvision's `FashionMNIST/raw`."""
    source.refuse_path("fashion-mnist")
    folders = [source.root, source.root / "fashion-mnist", source.root / "FashionMNIST" / "raw"]
    paths = find_files("fashion-mnist", source, folders, FILES, endings=("", ".gz"))
    return Dataset("fashion-mnist", _examples(*paths[:2]), _examples(*paths[2:]), classes=10)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the unsigned bytes of an IDX file with `dims` dimensions, as an array of the shape it states."""
    raw = _contents(path)
    header = 4 + 4 * dims
    if raw[:4] != bytes([0, 0, 8, dims]):
        raise MotleyError(
            f"{path} is not an IDX file of unsigned bytes with {dims} dimensions: "
            f"it starts with {raw[:4].hex(' ') or 'nothing'}, not {bytes([0, 0, 8, dims]).hex(' ')}."
        )
    if len(raw) < header:
        raise MotleyError(f"{path} is truncated: it ends inside its header.")
    shape = struct.unpack(f">{dims}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        problem = "is truncated" if len(raw) - header < math.prod(shape) else "has bytes too many"
        raise MotleyError(
            f"{path} {problem}: shape {shape} needs {math.prod(shape)} values and it holds {len(raw) - header}."
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()


def _contents(path: Path) -> bytes:
    """Return a file's bytes, unpacked."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from error
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    if len(raw) > MAX_BYTES:
        raise MotleyError(f"{path} holds more than {MAX_BYTES:,} bytes, which no file of Fashion-MNIST does.")
    return raw


def _examples(images: Path, labels: Path) -> Examples:
    return Examples(read_idx(images, 3)[..., np.newaxis], read_idx(labels, 1).astype(np.int64))
