"""Damaged files of every format: a reader returns a data set or raises MotleyError, nothing else.

The short run is part of the usual tests. `pytest -m slow tests/data/test_fuzz.py` runs each reader
for a minute.
"""

from __future__ import annotations

import io
import json
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from motley.core.errors import MotleyError
from motley.data.files.reading import read_files
from motley.data.files.settings import FileSettings

SECONDS = float(os.environ.get("MOTLEY_FUZZ_SECONDS", "60"))
ROWS = [(i, i / 7, "mf"[i % 2], f"h{i % 3}", ["well", "ill"][i % 4 == 0]) for i in range(24)]
NAMES = ("age", "weight", "sex", "client", "label")
TABLE = FileSettings(client="client")


def csv_file() -> bytes:
    lines = [",".join(NAMES), *(",".join(map(str, row)) for row in ROWS)]
    return ("\ufeff" + "\r\n".join(lines) + '\r\n1,2,"m\n",h0,"ill"\r\n').encode()


def jsonl_file() -> bytes:
    records = [dict(zip(NAMES, row, strict=True)) for row in ROWS]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def arrow_table() -> pa.Table:
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(NAMES)}
    table = pa.table(columns)
    return table.set_column(2, "sex", table.column("sex").dictionary_encode())


def parquet_file() -> bytes:
    content = io.BytesIO()
    pq.write_table(arrow_table(), content, row_group_size=10)
    return content.getvalue()


def lists_file() -> bytes:
    """A Parquet file of nested lists and images, as `datasets` writes it."""
    png = io.BytesIO()
    Image.new("RGB", (3, 4)).save(png, "PNG")
    image = {"bytes": png.getvalue(), "path": None}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    content = io.BytesIO()
    columns = {"image": pa.array([image] * 12, kind), "label": [0, 1, 2] * 4}
    table = pa.table(columns).append_column("x", pa.array([[[1.0, 2.0]]] * 12))
    pq.write_table(table, content, compression="none")
    return content.getvalue()


def stream_file() -> bytes:
    content = io.BytesIO()
    with pa.ipc.new_stream(content, arrow_table().schema) as writer:
        writer.write_table(arrow_table())
    return content.getvalue()


def npz_file() -> bytes:
    content = io.BytesIO()
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(12, 3)), "y_train": np.array(["a", "b"] * 6)}
    np.savez_compressed(content, **arrays, clients_train=np.arange(12) % 3)
    return content.getvalue()


def image_file(name: str) -> Callable[[], bytes]:
    def make() -> bytes:
        content = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(content, name)
        return content.getvalue()

    return make


def text_file() -> bytes:
    return ("Wörter und Wörter\r\n" * 20).encode()


def write_alone(folder: Path, content: bytes, name: str) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def write_stream(folder: Path, content: bytes, name: str) -> Path:
    (folder / name).write_bytes(content)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return folder


def write_state(folder: Path, content: bytes, name: str) -> Path:
    (folder / "data.arrow").write_bytes(stream_file())
    (folder / name).write_bytes(content)
    return folder


def write_image(folder: Path, content: bytes, name: str) -> Path:
    for label in ("a", "b"):
        (folder / label).mkdir(exist_ok=True)
        (folder / label / f"1{Path(name).suffix}").write_bytes(content)
        (folder / label / f"2{Path(name).suffix}").write_bytes(content)
    return folder


State = json.dumps({"_data_files": [{"filename": "data.arrow"}], "_indices_files": None}).encode
Writer = Callable[[Path, bytes, str], Path]
READERS: dict[str, tuple[Callable[[], bytes], Writer, str, FileSettings]] = {
    "csv": (csv_file, write_alone, "mine.csv", TABLE),
    "jsonl": (jsonl_file, write_alone, "mine.jsonl", TABLE),
    "parquet": (parquet_file, write_alone, "mine.parquet", TABLE),
    "lists": (lists_file, write_alone, "mine.parquet", FileSettings(features=("image",))),
    "stream": (stream_file, write_stream, "data.arrow", TABLE),
    "state": (State, write_state, "state.json", TABLE),
    "npz": (npz_file, write_alone, "mine.npz", FileSettings()),
    "png": (image_file("PNG"), write_image, "a.png", FileSettings(test_fraction=0.5)),
    "jpeg": (image_file("JPEG"), write_image, "a.jpg", FileSettings(test_fraction=0.5)),
    "webp": (image_file("WEBP"), write_image, "a.webp", FileSettings(test_fraction=0.5)),
    "bmp": (image_file("BMP"), write_image, "a.bmp", FileSettings(test_fraction=0.5)),
    "text": (text_file, write_alone, "mine.txt", FileSettings(sequence_length=9)),
}
TRICKY = (b"\0", b"\xff\xfe", b'"', b",", b"\n", b"{", b"[", b"1e999", b"NaN", b"-1", b"\x80\x04K.")


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return the content with a few damages: bits, bytes, cuts, repetitions, swapped pieces."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(7)
        at = rng.randrange(len(raw)) if raw else 0
        length = min(len(raw) - at, rng.choice((1, 2, 4, 8, 40)))
        if kind == 0 and raw:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and raw:
            raw[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            raw[at:at] = rng.choice(TRICKY)
        elif kind == 3:
            del raw[at : at + length]
        elif kind == 4:
            raw[at:at] = raw[at : at + length] * rng.choice((1, 2, 50))
        elif kind == 5 and rng.random() < 0.3:
            del raw[at:]
        elif kind == 6:
            # Swap two pieces: columns of a line, fields of a header.
            other = rng.randrange(len(raw)) if raw else 0
            raw[at : at + length], raw[other : other + length] = (
                raw[other : other + length],
                raw[at : at + length],
            )
    return bytes(raw)


def read_damaged(name: str, seed: int, folder: Path) -> str:
    """Read a damaged file; return the message, or "" if it could be read."""
    make, write, file_name, file_settings = READERS[name]
    content = damage(make(), random.Random(seed))
    path = write(folder, content, file_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            read_files(path, file_settings)
        except MotleyError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_whole_files_can_be_read(name: str, tmp_path: Path) -> None:
    make, write, file_name, file_settings = READERS[name]
    reading = read_files(write(tmp_path, make(), file_name), file_settings)
    assert len(reading.dataset.train)


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_raise_nothing_but_motley_errors(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(name)

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        read_damaged(name, seed, folder)

    check()


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("parquet", 1035),  # statistics of a column; reading them ended the process
        ("stream", 159),  # a huge body is declared; it was allocated
        ("stream", 597),  # offsets point outside of the data; the process ended
        ("stream", 4355),  # a column's name is not UTF-8
    ],
)
def test_damages_that_once_did_harm(name: str, seed: int, tmp_path: Path) -> None:
    assert str(tmp_path) in read_damaged(name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_minute_of_damaged_files(name: str, tmp_path: Path) -> None:
    end = time.monotonic() + SECONDS
    messages: set[str] = set()
    seed = read = 0
    while time.monotonic() < end:
        message = read_damaged(name, seed, tmp_path)
        read += not message
        messages.add(message[:60])
        seed += 1
    print(f"{name}: {seed} files, {read} could be read, {len(messages)} kinds of messages")
    assert seed > 100
