"""Hostile files: small ones that announce or expand to huge contents. No large memory is used."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from motley.core.errors import MotleyError
from motley.data.files import opening
from motley.data.files.arrow_messages import is_compressed
from motley.data.files.reading import read_files
from motley.data.files.settings import FileSettings

LIMIT = 600_000_000
"""Bytes of memory that a reader may take beyond what its libraries take."""


def npy(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(path: Path, x_train: bytes) -> Path:
    labels = npy((3,), "<i8", bytes(24))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", x_train)
        archive.writestr("y_train.npy", labels)
    return path


def huge_shape(folder: Path) -> tuple[Path, str]:
    path = npz(folder / "mine.npz", npy((10**6, 10**6), "|u1", bytes(100)))
    return path, "declares the shape"


def overflowing_shape(folder: Path) -> tuple[Path, str]:
    return npz(folder / "mine.npz", npy((2**33, 2**33), "<f8", bytes(100))), "declares the shape"


def negative_shape(folder: Path) -> tuple[Path, str]:
    return npz(folder / "mine.npz", npy((-1, 4), "|u1", bytes(100))), "mine.npz"


def zip_bomb(folder: Path) -> tuple[Path, str]:
    """Four gigabytes of zeros in four megabytes, written without holding them in memory."""
    path = folder / "mine.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x_train.npy", "w", force_zip64=True) as member:
            member.write(npy((3, 2**30), "|u1", b""))
            for _ in range(3 * 64):
                member.write(bytes(2**24))
        archive.writestr("y_train.npy", npy((3,), "<i8", bytes(24)))
    return path, "the limit is|taken for an attack"


def png(folder: Path, side: int) -> Path:
    """Write images that announce many pixels and hold few."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    content = b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        (folder / "images" / name / "1.png").write_bytes(content)
    return folder / "images"


def png_bomb(folder: Path) -> tuple[Path, str]:
    return png(folder, 60_000), "exceeds limit"


def large_png(folder: Path) -> tuple[Path, str]:
    return png(folder, 9_000), "9000 x 9000 pixels; images have at most 50,000,000"


def long_line(folder: Path) -> tuple[Path, str]:
    """One line of 200 MB. The file is sparse, but reading it gives that many bytes."""
    path = folder / "mine.csv"
    with path.open("wb") as file:
        file.write(b"a,target\n")
        file.write(b"1" * 20_000_000)
        file.truncate(200_000_000)
    return path, "more than 16,000,000 characters"


def many_columns(folder: Path) -> tuple[Path, str]:
    path = folder / "mine.csv"
    path.write_bytes(b"," * 1_000_000 + b"\n")
    return path, "1,000,001 columns"


def long_field(folder: Path) -> tuple[Path, str]:
    path = folder / "mine.csv"
    path.write_bytes(b'a,target\n"' + b"x\n" * 500_000)
    return path, "field larger than field limit"


def deep_json(folder: Path) -> tuple[Path, str]:
    path = folder / "mine.jsonl"
    path.write_bytes(b'{"a": ' * 1_000_000 + b"\n")
    return path, "line 1: is not a JSON record"


def many_keys(folder: Path) -> tuple[Path, str]:
    path = folder / "mine.jsonl"
    path.write_text(json.dumps({f"k{i}": 0 for i in range(150_000)}))
    return path, "150,000 keys"


def many_rows(folder: Path) -> tuple[Path, str]:
    """A Parquet file of 2 kilobytes with two thousand million nulls."""
    path = folder / "mine.parquet"
    writer = pq.ParquetWriter(path, pa.schema([("a", pa.null()), ("target", pa.null())]))
    table = pa.table({"a": pa.nulls(10_000_000), "target": pa.nulls(10_000_000)})
    for _ in range(60):
        writer.write_table(table, row_group_size=10_000_000)
    writer.close()
    return path, "declares 600,000,000 rows"


def compressed_stream(folder: Path) -> tuple[Path, str]:
    """An Arrow file of a few kilobytes that expands to 800 MB."""
    table = pa.table({"x": np.zeros(10**8), "target": np.zeros(10**8, np.int8)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    path = folder / "data.arrow"
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    return folder, "compressed Arrow files are not read"


def repeated_text(folder: Path) -> tuple[Path, str]:
    """A Parquet file of 1 MB in which one text of 1 MB is repeated 20,000 times."""
    path = folder / "mine.parquet"
    numbers = pa.array(np.zeros(20_000, np.int32))
    column = pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"a": column, "target": column}), path, store_schema=False)
    return path, "there is only one class"


HOSTILE: list[Callable[[Path], tuple[Path, str]]] = [
    huge_shape,
    overflowing_shape,
    negative_shape,
    png_bomb,
    large_png,
    long_line,
    many_columns,
    long_field,
    deep_json,
    many_keys,
    repeated_text,
]
SLOW: list[Callable[[Path], tuple[Path, str]]] = [zip_bomb, many_rows, compressed_stream]


def refused_in_little_memory(make: Callable[[Path], tuple[Path, str]], folder: Path) -> None:
    """Check the message, in this process, with a limit on further memory."""
    path, message = make(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    taken = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + LIMIT, hard))
    try:
        with pytest.raises(MotleyError, match=message):
            read_files(path, FileSettings())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_files_are_refused_in_little_memory(
    make: Callable[[Path], tuple[Path, str]], tmp_path: Path
) -> None:
    refused_in_little_memory(make, tmp_path)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_compressed_messages_are_recognised(compression: str | None) -> None:
    table = pa.table({"x": np.zeros(100), "s": pa.array(["a", "b"] * 50).dictionary_encode()})
    content = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(content, table.schema, options=options) as out:
        out.write_table(table)
    messages = list(pa.ipc.MessageReader.open_stream(pa.py_buffer(content.getvalue())))
    assert [message.type for message in messages] == ["schema", "dictionary", "record batch"]
    for message in messages[1:]:
        is_dictionary = message.type == "dictionary"
        metadata = message.metadata.to_pybytes()
        assert is_compressed(metadata, is_dictionary=is_dictionary) == (compression is not None)


@pytest.mark.slow
@pytest.mark.parametrize("make", SLOW)
def test_large_hostile_files_are_refused_in_little_memory(
    make: Callable[[Path], tuple[Path, str]], tmp_path: Path
) -> None:
    refused_in_little_memory(make, tmp_path)


def test_a_folder_of_hugging_face_is_read_without_datasets_and_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pa.table({"x": [float(i) for i in range(20)], "label": ["a", "b"] * 10})
    with (folder / "data.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises an ImportError
    reading = read_files(folder, FileSettings())
    assert reading.format == "huggingface" and len(reading.dataset.train) == 16


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("a,target\n1,2\n")
    monkeypatch.setattr(opening, "MAX_TEXT_BYTES", 5)
    with pytest.raises(MotleyError, match="has 13 bytes; text files of up to 5 are read"):
        read_files(path, FileSettings())


def test_the_declared_size_of_a_member_is_not_trusted(tmp_path: Path) -> None:
    """The central directory says that the member is small; its data is large."""
    content = io.BytesIO()
    np.savez_compressed(content, x_train=np.zeros((3, 10**6)), y_train=np.zeros(3, int))
    raw = content.getvalue()
    declared = struct.pack("<I", 3 * 8 * 10**6 + 128)
    assert raw.count(declared) >= 1
    path = tmp_path / "mine.npz"
    path.write_bytes(raw.replace(declared, struct.pack("<I", 200)))
    with pytest.raises(MotleyError, match=r"declares the shape|damaged"):
        read_files(path, FileSettings())
