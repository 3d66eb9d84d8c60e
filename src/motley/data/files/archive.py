"""Arrays from .npz files, whose declared sizes are checked before memory is allocated.

np.load allocates an array of the shape that its header declares before it reads any value, and a
compressed file can expand a thousandfold.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.opening import check_memory

#: Data that expands to more than this, and by more than this factor, is taken for a bomb.
BOMB_BYTES = 2_000_000_000
BOMB_RATIO = 100
_MAGIC = b"\x93NUMPY"


def check_archive(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and type of each array of a .npz file, after checking what it declares.

    Arrays of Python objects, which are pickles, keep their type; reading them is refused elsewhere.
    """
    declared: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in declared:
                raise MotleyError(f"{path}: the array {name!r} occurs twice.")
            total += member.file_size
            if member.file_size > max(BOMB_BYTES, BOMB_RATIO * member.compress_size):
                raise MotleyError(
                    f"{path}: {name} expands from {member.compress_size:,} to "
                    f"{member.file_size:,} bytes, which is taken for an attack. Save it with "
                    "np.savez, without compression."
                )
            check_memory(f"{path}: its arrays", total)
            with archive.open(member) as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    continue
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                if version == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                else:
                    shape, _, dtype = np.lib.format.read_array_header_2_0(file)
                header_bytes = file.tell()
            declared[name] = (shape, dtype)
            if dtype.hasobject:
                continue
            # Python's numbers, because NumPy's may overflow.
            expected = dtype.itemsize
            for length in shape:
                expected *= int(length)
            if any(length < 0 for length in shape) or expected != member.file_size - header_bytes:
                raise MotleyError(
                    f"{path}: {name} declares the shape {shape}, which is {expected:,} bytes, and "
                    f"{member.file_size - header_bytes:,} bytes follow."
                )
    return declared


#: What NumPy and zipfile raise for damaged files. zipfile raises RuntimeError for encrypted members
#: and NotImplementedError for unknown methods of compression. NumPy passes the header of an array
#: through Python's tokenizer.
DAMAGED = (
    ValueError,
    EOFError,
    OSError,
    RuntimeError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
