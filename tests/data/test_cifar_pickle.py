"""The reader of pickled CIFAR batches, on all layouts that exist and on malicious files."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.datasets import cifar10
from motley.data.datasets.cifar_pickle import read_pickled_batch

ROWS = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
BATCH = {
    b"batch_label": b"a batch",
    b"labels": [3, 9],
    b"data": ROWS,
    b"filenames": [b"one.png", b"two.png"],
}
LIMIT = 100_000


def released(rows: np.ndarray = ROWS, core: bytes = b"core") -> bytes:
    """Return a batch as in the original release, written by Python 2's cPickle.

    Memo entries and short strings are included.
    """
    shape = b"K" + bytes([len(rows)]) + b"M" + struct.pack("<H", rows.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
    dtype += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy."
        + core
        + b".multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
    )
    array += (
        b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", rows.size) + rows.tobytes() + b"tb"
    )
    names = b"U\x09filenamesq\x0c]q\x0d(U\x07one.pngq\x0eU\x07two.pngr\x0f\x00\x00\x00e"
    labels = b"U\x06labelsq\x04]q\x05(K\x03K\x09e"
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x07a batchq\x03"
        + labels
        + b"U\x04dataq\x06"
        + array
        + names
        + b"u."
    )


def written(folder: Path, content: bytes) -> Path:
    path = folder / "data_batch_1"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("core", [b"core", b"_core"])
def test_the_layout_of_the_original_release_is_read(core: bytes, tmp_path: Path) -> None:
    batch = read_pickled_batch(written(tmp_path, released(core=core)), LIMIT)
    assert np.array_equal(batch["data"], ROWS)
    assert batch["labels"] == [3, 9] and batch["filenames"] == [b"one.png", b"two.png"]
    assert pickle.loads(released(), encoding="bytes")[b"labels"] == [3, 9]  # pickle agrees


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_python_3_writes_is_read(protocol: int, order: Any, tmp_path: Path) -> None:
    content = pickle.dumps({**BATCH, b"data": np.array(ROWS, order=order)}, protocol)
    batch = read_pickled_batch(written(tmp_path, content), LIMIT)
    assert np.array_equal(batch["data"], ROWS) and batch["data"].dtype == np.uint8
    assert batch["labels"] == [3, 9] and batch["batch_label"] == b"a batch"


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, released())
    with pytest.raises(MotleyError, match=r"data_batch_1 has 6,\d\d\d bytes; .* has at most 99\."):
        read_pickled_batch(path, 99)
    monkeypatch.setattr(cifar10, "MAX_BYTES", 99)
    with pytest.raises(MotleyError, match="at most 99"):
        cifar10.read_batch(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=r"absent cannot be read: .*No such file"):
        read_pickled_batch(tmp_path / "absent", LIMIT)
    with pytest.raises(MotleyError, match=r"cannot be read: .*directory"):
        read_pickled_batch(tmp_path, LIMIT)


# --- attacks

ATTACKS: dict[str, bytes] = {
    # An object array whose one pointer is eight bytes of the file. Replacing the object frees it.
    "crash": b"cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nU\x01O\x85R\x96"
    + struct.pack("<Q", 8)
    + b"AAAAAAAAtRK\x00Ns.",
    # The same through an array's state.
    "state": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01O\x87R"
    b"(K\x01K\x01\x85cnumpy\ndtype\nU\x01O\x85R\x89U\x08AAAAAAAAtb.",
    # A declared shape, and a memo index, that would allocate 2.9 GiB each.
    "shape": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    b"\x8a\x05\x00\x00\x00\xc0\x00\x85U\x01b\x87R.",
    "memo": b"\x80\x02}r\x00\x00\x00\x10.",
    # A string of 1 MB that is encoded a thousand times.
    "encode": b"\x80\x02](X\x40\x42\x0f\x00"
    + b"a" * 1_000_000
    + b"q\x00"
    + b"c_codecs\nencode\nh\x00U\x06latin1\x86R" * 1000
    + b"e.",
    "announced": b"\x80\x02\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    # Nested tuples: hashing them overflows the stack, and freeing them might, too.
    "nested key": b"\x80\x02})" + b"\x85" * 900_000 + b"Ns.",
    "nested": b"\x80\x02)" + b"\x85" * 900_000 + b".",
    "many": b"\x80\x04" + b"}\x94" * 1_000_000 + b".",
}

ATTACKED = """
import json, os, resource, sys
from pathlib import Path
from motley.data.datasets.cifar10 import read_batch
from motley.core.errors import MotleyError

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 700_000_000
for file in sorted(Path(sys.argv[1]).iterdir()):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            read_batch(file)
        except MotleyError as error:
            os.write(write, str(error).encode()[:500])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    print(json.dumps([file.name, os.waitpid(child, 0)[1], said]), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_attacks_are_refused_in_little_memory(tmp_path: Path) -> None:
    """Each attack runs in its own process, which may allocate at most 700 MB."""
    for name, content in ATTACKS.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", ATTACKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answers = {
        name: (status, said) for name, status, said in map(json.loads, done.stdout.splitlines())
    }
    assert answers.keys() == ATTACKS.keys()
    for name, (status, said) in answers.items():
        assert status == 0, (name, status)
        assert str(tmp_path / name) in said and "MemoryError" not in said, (name, said)
    for name in ("crash", "state", "encode", "nested key", "many"):
        assert "refused to load" in answers[name][1], answers[name]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"\x80\x02cos\nsystem\n(U\x04truetR.",
            r"refused to load 'os\.system', which .* Nothing was run",
        ),
        (b"\x80\x02i", r"refused to load pickle opcode b'i'"),
        (b"\x80\x02c" + b"x" * 10_000 + b"\ny\n.", r"refused to load 'x{100}', which"),
        (
            released().replace(b"U\x02u1", b"U\x02f4"),
            "a call of numpy.dtype with unexpected arguments",
        ),
        (
            released().replace(b"K\x02M\x00\x0c", b"K\x03M\x00\x0c"),
            "shape does not match its bytes",
        ),
        (
            released().replace(b"K\x02M\x00\x0c", b"\x8a\x01\xffM\x00\x0c"),
            "shape does not match its bytes",
        ),
        (b"\x80\x02K\x01}b.", "refused to load a state for a int"),
        (b"\x80\x02K\x01.", "it holds a int, not a dict"),
    ],
)
def test_a_refusal_says_what_was_wanted(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=said):
        read_pickled_batch(written(tmp_path, content), LIMIT)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """Change, delete, duplicate and insert bytes, mostly outside the image data."""
    numbers = np.random.default_rng(1)
    small = ROWS
    originals = [
        released(small),
        *(pickle.dumps({**BATCH, b"data": small}, protocol) for protocol in (2, 4, 5)),
    ]
    opcodes = "".join(known.code for known in pickletools.opcodes).encode("latin1")
    read = 0
    for trial in range(600):
        content = bytearray(originals[trial % len(originals)])
        pixels = content.find(small.tobytes()[:8])
        for _ in range(numbers.integers(1, 5)):
            place = int(numbers.integers(len(content)))
            if pixels >= 0 and numbers.random() < 0.9:
                place = place % pixels
            kind = numbers.integers(4)
            if kind == 0:
                content[place] = numbers.integers(256)
            elif kind == 1:
                content[place] = opcodes[numbers.integers(len(opcodes))]
            elif kind == 2:
                del content[place : place + int(numbers.integers(1, 9))]
            else:
                content[place:place] = content[place : place + int(numbers.integers(1, 9))]
        try:
            cifar10.read_batch(written(tmp_path, bytes(content)))
            read += 1
        except MotleyError as error:
            assert len(str(error)) < 1000
    assert 0 < read < 600
