"""Arrays from .npz files, whose declared sizes are checked before memory is allocated.

np.load allocates an array of the shape that its header declares before it reads any value, and a
compressed file can expand a thousandfold. zipfile reads no more of a member than the archive's
directory declares, so a declared size that has been checked is a limit. This holds for deflate and
for members without compression, the two that NumPy writes. bzip2 and LZMA are refused: zipfile
decompresses them without a limit.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.limits import check_data, check_expansion

#: Methods of compression that NumPy writes.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OTHER_METHODS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma", 93: "zstandard"}
#: The bit of a member's flags that says that it is encrypted.
ENCRYPTED = 0x1
_MAGIC = b"\x93NUMPY"


def check_archive(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and type of each array of a .npz file, after checking its declarations.

    Arrays of Python objects, which are pickles, keep their type; reading them is refused elsewhere.
    """
    declared: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in declared:
                raise MotleyError(f"{path}: the array {name!r} occurs twice.")
            _check_member(path, member)
            total += member.file_size
            check_data(f"{path}: its arrays", total)
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
    check_expansion(f"{path}: its arrays", path.stat().st_size, total)
    return declared


def check_members(path: Path) -> None:
    """Check the declared sizes of all members of any zip archive, before one of them is read."""
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            _check_member(path, member)
            total += member.file_size
    check_expansion(f"{path}: its content", path.stat().st_size, total)


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    if member.flag_bits & ENCRYPTED:
        raise MotleyError(f"{path}: {member.filename} is encrypted, which is not read.")
    if member.compress_type not in METHODS:
        method = OTHER_METHODS.get(member.compress_type, str(member.compress_type))
        raise MotleyError(
            f"{path}: {member.filename} is compressed with {method!r}, which is not read. Save it "
            "with np.savez or np.savez_compressed."
        )
    # Members may share their bytes, so that each one alone is a bomb.
    check_expansion(f"{path}: {member.filename}", member.compress_size, member.file_size)


#: The exceptions of NumPy and zipfile for damaged files. zipfile raises RuntimeError for encrypted
#: members and NotImplementedError for unknown methods of compression. NumPy passes the header of an
#: array through Python's tokenizer.
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
