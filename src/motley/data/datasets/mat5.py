"""Read numeric arrays from MATLAB files of version 5, the format that SVHN is released in.

A file consists of a header of 128 bytes and of elements. An element has a type, a length and that
many bytes. The elements of a file are arrays (matrices), each of them usually compressed with zlib.
An array consists of elements itself: flags with its class, its dimensions, its name, its values.

Only plain numeric arrays are read, and only those that are asked for. The reader allocates memory
after it has compared the lengths in the file with the bytes that are there, and it decompresses no
more than a given number of bytes: a small file can expand to many gigabytes of zeros.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from motley.core.errors import MotleyError

HEADER_BYTES = 128
VERSION_5 = 0x0100
VERSION_7_3 = 0x0200
MAX_DIMENSIONS = 8

INT8, INT32, UINT32, MATRIX, COMPRESSED = 1, 5, 6, 14, 15
#: Type of an element -> NumPy's code of its values.
VALUE_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8"}
VALUE_TYPES[13] = "u8"
#: Classes of arrays: 6 double, 7 single, 8 to 15 whole numbers. Others are text, cells, objects.
NUMERIC_CLASSES = range(6, 16)
COMPLEX_FLAG = 0x08
#: A compressed array that is larger than this may expand by at most this factor.
MIN_EXPANDED_BYTES = 1_000_000
MAX_RATIO = 100


class _DamagedError(Exception):
    """The file does not follow the format."""


class _Element(NamedTuple):
    type: int
    content: memoryview


def read_mat5(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, np.ndarray]:
    """Return the arrays with these names. Files that hold more than `max_bytes` are rejected."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise MotleyError(
                f"{path} has {size:,} bytes; a file of this data set has at most {max_bytes:,}."
            )
        raw = path.read_bytes()
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    try:
        arrays = _read_arrays(raw, names, max_bytes)
    except (_DamagedError, zlib.error, struct.error) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise MotleyError(f"{path} has no array of numbers named {' or '.join(missing)}.")
    return arrays


def _read_arrays(raw: bytes, names: Sequence[str], max_bytes: int) -> dict[str, np.ndarray]:
    order = _byte_order(raw)
    arrays: dict[str, np.ndarray] = {}
    decompressed_bytes = 0
    elements = _Elements(memoryview(raw)[HEADER_BYTES:], order)
    while not elements.at_end():
        element = elements.next()
        if element.type == COMPRESSED:
            content = _decompress(element.content, max_bytes - decompressed_bytes)
            decompressed_bytes += len(content)
            element = _Elements(memoryview(content), order).next()
        if element.type != MATRIX:
            continue
        name, array = _read_matrix(_Elements(element.content, order), names)
        if array is not None:
            arrays[name] = array
    return arrays


def _byte_order(raw: bytes) -> str:
    """Check the header and return the byte order of the numbers: "<" or ">"."""
    if len(raw) < HEADER_BYTES:
        raise _DamagedError("it ends inside its header")
    order = {b"IM": "<", b"MI": ">"}.get(raw[126:128])
    if order is None:
        raise _DamagedError("it does not have the header of a MATLAB file")
    (version,) = struct.unpack(order + "H", raw[124:126])
    if version == VERSION_7_3:
        raise _DamagedError("it is a MATLAB file of version 7.3, and version 5 is expected")
    if version != VERSION_5:
        raise _DamagedError(f"its version is {version:#06x}, and {VERSION_5:#06x} is expected")
    return order


def _decompress(content: memoryview, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj()
    # Images shrink by a factor of 3, and labels by 10.
    max_bytes = min(max_bytes, max(MIN_EXPANDED_BYTES, MAX_RATIO * len(content)))
    # One byte more than allowed is enough to see that there is too much.
    decompressed = decompressor.decompress(content, max_bytes + 1)
    if len(decompressed) > max_bytes:
        raise _DamagedError(f"an array expands to more than {max_bytes:,} bytes")
    if not decompressor.eof:
        raise _DamagedError("a compressed array ends too early")
    return decompressed


class _Elements:
    """The elements in some bytes, one after the other."""

    def __init__(self, content: memoryview, order: str) -> None:
        self.content = content
        self.order = order
        self.position = 0

    def at_end(self) -> bool:
        return self.position >= len(self.content)

    def next(self) -> _Element:
        """Return the next element."""
        tag = self._take(4)
        (number,) = struct.unpack(self.order + "I", tag)
        if number >> 16:
            # The small format: type, length and up to four bytes of content in eight bytes.
            length = number >> 16
            if length > 4:
                raise _DamagedError("an element's length does not fit its format")
            return _Element(number & 0xFFFF, self._take(4)[:length])
        (length,) = struct.unpack(self.order + "I", self._take(4))
        content = self._take(length)
        if number != COMPRESSED:
            # Padded to a multiple of 8 bytes. The padding of the last element may be missing.
            self.position += -length % 8
        return _Element(number, content)

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.content):
            raise _DamagedError("it ends too early")
        piece = self.content[self.position : end]
        self.position = end
        return piece


def _read_matrix(elements: _Elements, names: Sequence[str]) -> tuple[str, np.ndarray | None]:
    """Return an array's name and, if it is one of `names` and numeric, its values."""
    flags = elements.next()
    if flags.type != UINT32 or len(flags.content) != 8:
        raise _DamagedError("an array has no flags")
    (flag_bits, _) = struct.unpack(elements.order + "II", flags.content)
    array_class, is_complex = flag_bits & 0xFF, (flag_bits >> 8) & COMPLEX_FLAG
    dimensions = elements.next()
    if dimensions.type != INT32 or not 8 <= len(dimensions.content) <= 4 * MAX_DIMENSIONS:
        raise _DamagedError("an array has no plain dimensions")
    shape = tuple(np.frombuffer(dimensions.content, elements.order + "i4").tolist())
    name_element = elements.next()
    if name_element.type != INT8:
        raise _DamagedError("an array has no name")
    name = bytes(name_element.content).decode("latin1")
    if name not in names or array_class not in NUMERIC_CLASSES or is_complex:
        return name, None
    values = elements.next()
    code = VALUE_TYPES.get(values.type)
    if code is None:
        raise _DamagedError(f"the values of {name!r} are not numbers")
    if min(shape) < 0 or math.prod(shape) * int(code[1]) != len(values.content):
        raise _DamagedError(
            f"the shape {shape} of {name!r} does not match its {len(values.content)} bytes"
        )
    array = np.frombuffer(values.content, elements.order + code)
    return name, array.reshape(shape, order="F")
