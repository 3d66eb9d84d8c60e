"""Bombs: files of a few kilobytes to some megabytes that expand to gigabytes.

One other process reads all of them with the readers of every format, and reports the message about
each and the memory it took. `python -m tests.data.test_bombs FOLDER` is that process.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.limits import (
    BOMB_BYTES,
    LIMIT_VARIABLE,
    SMALLEST_LIMIT,
    bounded,
    check_data,
    check_expansion,
    data_limit,
    free_memory,
    size_text,
)
from tests.data.test_hostile import npy
from tests.data.test_mnist import digits, idx, pixels

#: Bytes that all bombs together may take. Almost every one of them expands to gigabytes.
ALLOWED_GROWTH = 600_000_000
BLOCK = 2**24


def deflated(start: bytes, zeros: int) -> bytes:
    """Return a raw deflate stream of some bytes and many zeros, without compressing all of them.

    After a full flush, a block does not depend on those before it, so one block can be repeated.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    stream = compressor.compress(start) + compressor.flush(zlib.Z_FULL_FLUSH)
    block = compressor.compress(bytes(BLOCK)) + compressor.flush(zlib.Z_FULL_FLUSH)
    return stream + block * (zeros // BLOCK) + compressor.flush()


def zip_file(path: Path, members: dict[str, tuple[bytes, int, int]]) -> Path:
    """Write a zip archive of streams: name -> (deflate stream, declared size, method)."""
    with path.open("wb") as file:
        directory = b""
        for name, (stream, size, method) in members.items():
            place = file.tell()
            crc = zlib.crc32(zlib.decompress(stream, -15)) if size < 10**6 and method == 8 else 0
            fields = struct.pack("<HHHHHIII", 20, 0, method, 0, 33, crc, len(stream), size)
            names = struct.pack("<HH", len(name), 0) + name.encode()
            file.write(b"PK\3\4" + fields + names + stream)
            directory += b"PK\1\2" + struct.pack("<H", 20) + fields
            directory += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, place) + name.encode()
        start = file.tell()
        file.write(directory + b"PK\5\6")
        counts = (0, 0, len(members), len(members), len(directory), start, 0)
        file.write(struct.pack("<HHHHIIH", *counts))
    return path


def array_bomb(shape: tuple[int, ...], dtype: str) -> tuple[bytes, int, int]:
    """Return a member of zeros for `zip_file`."""
    start = npy(shape, dtype, b"")
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    return deflated(start, size), len(start) + size, zipfile.ZIP_DEFLATED


def small_array(values: np.ndarray) -> tuple[bytes, int, int]:
    content = io.BytesIO()
    np.save(content, values)
    raw = content.getvalue()
    return deflated(raw, 0), len(raw), zipfile.ZIP_DEFLATED


# ---- what reads each file, in the other process


def read_own(path: Path) -> None:
    from motley.data.files.reading import read_files
    from motley.data.files.settings import FileSettings

    read_files(path, FileSettings(inputs="auto"))


def read_npz(path: Path) -> None:
    from motley.data.dataset import load_dataset

    load_dataset("npz", path=path)


def read_named(name: str) -> Callable[[Path], None]:
    def read(root: Path) -> None:
        from motley.data.dataset import load_dataset

        load_dataset(name, root=root)

    return read


def read_partition(path: Path) -> None:
    from motley.data.partition import FromFile

    FromFile(path=path).split(np.zeros(10), 1, 0)


def read_predicted(path: Path) -> None:
    from motley.data.transforms import TransformSettings
    from motley.export.files import read_inputs
    from motley.export.inputs import InputFormat
    from motley.models.inputs import TableShape

    read_inputs(path, InputFormat(TableShape(2**21), "float32", TransformSettings()))


def read_program(path: Path) -> None:
    from motley.export.formats import open_program

    open_program(path)


# ---- what writes each file


def two_arrays(folder: Path) -> Path:
    labels = small_array(np.arange(192) % 2)
    members = {"x_train.npy": array_bomb((192, 2**21), "<f8"), "y_train.npy": labels}
    return zip_file(folder / "two.npz", members)


def images(folder: Path) -> Path:
    labels = small_array(np.arange(48) % 2)
    bomb = array_bomb((48, 2**12, 2**12, 1), "|u1")
    members = {"x_train.npy": bomb, "y_train.npy": labels, "x_test.npy": bomb, "y_test.npy": labels}
    return zip_file(folder / "images.npz", members)


def one_array(folder: Path) -> Path:
    """For a partition and for `motley predict`."""
    return zip_file(folder / "one.npz", {"0.npy": array_bomb((192, 2**21), "<i8")})


def other_method(method: int, name: str) -> Callable[[Path], Path]:
    """A member whose size is declared as 200 bytes; zipfile would decompress all of it."""

    def make(folder: Path) -> Path:
        import bz2
        import lzma

        raw = npy((3, 2**22), "|u1", b"")
        content = raw + bytes(3 * 2**22)
        if method == zipfile.ZIP_BZIP2:
            stream = bz2.compress(content)
        else:
            filters = [{"id": lzma.FILTER_LZMA1, "preset": 0}]
            stream = lzma.compress(content, lzma.FORMAT_RAW, filters=filters)
            stream = b"\x09\x04\x05\x00" + b"\x5d\x00\x00\x04\x00" + stream
        members = {"x_train.npy": (stream, 200, method)}
        members["y_train.npy"] = small_array(np.zeros(3, int))
        return zip_file(folder / f"{name}.npz", members)

    return make


def gzip_bomb(name: str, content: bytes) -> Callable[[Path], Path]:
    """An IDX file of training images in which three gigabytes of zeros follow `content`."""

    def make(folder: Path) -> Path:
        root = folder / name
        (root / "mnist").mkdir(parents=True)
        for file, part in (("train-labels-idx1", digits(3)), ("t10k-labels-idx1", digits(3))):
            (root / "mnist" / f"{file}-ubyte.gz").write_bytes(gzip.compress(idx(part)))
        (root / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels(3))))
        header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
        stream = header + deflated(content, 3 * 2**30) + bytes(8)
        (root / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(stream)
        return root

    return make


def matlab(folder: Path) -> Path:
    root = folder / "matlab"
    (root / "svhn").mkdir(parents=True)
    stream = b"\x78\xda" + deflated(struct.pack("<II", 14, 2**30), 2**30)
    header = b"MATLAB 5.0".ljust(124) + b"\x00\x01IM"
    for part in ("train", "test"):
        content = header + struct.pack("<II", 15, len(stream)) + stream
        (root / "svhn" / f"{part}_32x32.mat").write_bytes(content)
    return root


def null_columns(folder: Path) -> Path:
    """A Parquet file of two kilobytes with 80 million rows of nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "nulls.parquet"
    table = pa.table({"a": pa.nulls(10**7), "target": pa.nulls(10**7)})
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(8):
            writer.write_table(table, row_group_size=10**7)
    return path


def repeated_in_lists(folder: Path) -> Path:
    """A Parquet file in which lists repeat one text of 1 MB 20,000 times."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.array(["x" * 1_000_000])
    rows = pa.array(np.arange(0, 20_001, 10, dtype=np.int32))
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), text)
    column = pa.ListArray.from_arrays(rows, repeated)
    table = pa.table({"a": column, "target": pa.array(["m", "n"] * 1_000)})
    path = folder / "lists.parquet"
    pq.write_table(table, path, store_schema=False)
    return path


def blank_images(folder: Path) -> Path:
    """Forty images of 49 million zeros."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("L", (7_000, 7_000)).save(content, "PNG", compress_level=6)
    root = folder / "blank"
    for number in range(40):
        label = root / "ab"[number % 2]
        label.mkdir(parents=True, exist_ok=True)
        (label / f"{number}.png").write_bytes(content.getvalue())
    return root


def program(folder: Path) -> Path:
    member = (deflated(b"", 3 * 2**30), 3 * 2**30, zipfile.ZIP_DEFLATED)
    return zip_file(folder / "model.pt2", {"archive/data/weights_config.json": member})


ATTACK = "taken for an attack|and the limit is"
#: Name -> what writes the file, what reads it, and a part of the message.
BOMBS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None], str]] = {
    "npz": (two_arrays, read_own, ATTACK),
    "npz images": (images, read_npz, ATTACK),
    "partition": (one_array, read_partition, ATTACK),
    "predict": (lambda folder: folder / "one.npz", read_predicted, ATTACK),
    "bzip2": (other_method(zipfile.ZIP_BZIP2, "bzip2"), read_npz, "compressed with 'bzip2'"),
    "lzma": (other_method(zipfile.ZIP_LZMA, "lzma"), read_own, "compressed with 'lzma'"),
    "gzip": (
        gzip_bomb("declared", idx(pixels(0), (2**22, 28, 28))),
        read_named("mnist"),
        "declares the shape .* more than the 200,000,000 bytes",
    ),
    "gzip behind": (gzip_bomb("behind", idx(pixels(3))), read_named("mnist"), "has extra bytes"),
    "matlab": (matlab, read_named("svhn"), "expands to more than"),
    "parquet nulls": (null_columns, read_own, ATTACK),
    "parquet lists": (repeated_in_lists, read_own, "takes more than .* which is the limit"),
    "png": (blank_images, read_own, ATTACK),
    "pt2": (program, read_program, ATTACK),
}


def read_all(folder: Path) -> list[dict[str, object]]:
    """Read every bomb; return the message about each and the growth of the peak since the start."""
    import pyarrow.parquet  # noqa: F401
    from PIL import Image  # noqa: F401

    import motley.data.datasets
    import motley.export.formats  # noqa: F401

    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = []
    for name, (_, read, _) in BOMBS.items():
        message = "was read"
        try:
            read(Path((folder / f"{name}.path").read_text()))
        except MotleyError as error:
            message = str(error)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results.append({"name": name, "message": message, "growth": 1024 * (peak - start)})
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("bombs")
    for name, (make, _, _) in BOMBS.items():
        path = make(folder)
        total = path.stat().st_size
        if path.is_dir():
            total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert total < 8_000_000, name
        (folder / f"{name}.path").write_text(str(path))
    environment = {**os.environ, LIMIT_VARIABLE: ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.test_bombs", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {result["name"]: result for result in json.loads(done.stdout)}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_its_name(name: str, results: dict[str, dict[str, object]]) -> None:
    import re

    message = str(results[name]["message"])
    assert re.search(BOMBS[name][2], message), message
    assert "/bombs" in message  # the path of the file
    if "taken for an attack" in message or "the limit is" in message:
        assert LIMIT_VARIABLE in message


def test_no_bomb_takes_memory(results: dict[str, dict[str, object]]) -> None:
    growth = {name: result["growth"] for name, result in results.items()}
    assert max(int(str(value)) for value in growth.values()) < ALLOWED_GROWTH, growth


# ---- the limit itself


def test_the_limit_is_half_of_the_free_memory_or_what_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    free = free_memory()
    assert free is not None and free > 0
    limit = data_limit()
    assert not limit.chosen and limit.bytes >= SMALLEST_LIMIT
    assert limit.bytes == SMALLEST_LIMIT or 0.4 * free < limit.bytes < 0.6 * free
    for text, number in (("8GB", 8 * 10**9), ("1.5 mb", 1_500_000), ("20", 20), ("3k", 3_000)):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        assert data_limit() == (number, True)
    for text in ("much", "-1", "1e9", "GB", "1.2.3", "9" * 400):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(MotleyError, match="should be a number of bytes, such as 8GB"):
            data_limit()


def test_a_limit_of_the_users_own_replaces_the_check_of_the_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    check_expansion("mine", 10, BOMB_BYTES)
    with pytest.raises(
        MotleyError, match=r"mine would (expand from 10 bytes|take) .*MOTLEY_MEMORY"
    ):
        check_expansion("mine", 10, BOMB_BYTES + 1)
    monkeypatch.setenv(LIMIT_VARIABLE, "1GB")
    check_expansion("mine", 10, BOMB_BYTES + 1)
    with pytest.raises(MotleyError, match=r"2\.0 GB of memory, and the limit is 1\.0 GB \(MOTLEY"):
        check_expansion("mine", 10**9, 2 * 10**9)
    monkeypatch.setenv(LIMIT_VARIABLE, "10")
    with pytest.raises(MotleyError, match=r"a file would take 11 bytes .* limit is 10 bytes"):
        check_data("a file", 11)


def test_sizes_have_units() -> None:
    assert [size_text(n) for n in (999, 5_000_000, 2_500_000_000)] == [
        "999 bytes",
        "5 MB",
        "2.5 GB",
    ]


def test_a_bounded_block_cannot_take_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "50MB")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MotleyError, match=r"inside takes more than 50 MB of memory"):  # noqa: SIM117
        with bounded("my.json"), bounded("inside"):
            bytearray(2 * 10**9)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with bounded("my.json"):
        assert len(bytearray(10**7)) == 10**7
    assert resource.getrlimit(resource.RLIMIT_AS) == before


if __name__ == "__main__":
    print(json.dumps(read_all(Path(sys.argv[1]))))
