"""Damaged files of the natural data sets: a reader returns a data set or raises MotleyError."""

from __future__ import annotations

import gzip
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from tests.data.natural_files import (
    write_har_arrays,
    write_har_release,
    write_heart,
    write_leaf,
    write_qmnist,
    write_texts,
    write_writers,
)

SECONDS = float(os.environ.get("MOTLEY_FUZZ_SECONDS", "60"))
#: Form -> the data set, and what writes its files.
FORMS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "har text": ("har", lambda root: write_har_release(root, people=2)),
    "har arrays": ("har", write_har_arrays),
    "qmnist": ("mnist-writers", write_qmnist),
    "writers": ("mnist-writers", write_writers),
    "heart": ("heart", write_heart),
    "texts": ("shakespeare", write_texts),
    "leaf": ("shakespeare", lambda root: write_leaf(root, divided=True)),
}
TOKENS = (b"nan", b"1e999", b"-1", b"?", b",", b"\n", b"\0", b"\xff\xfe", b'"', b"{", b"]", b"null")


def damaged(content: bytes, numbers: random.Random) -> bytes:
    """Return the content with one to four changes."""
    changed = bytearray(content)
    for _ in range(numbers.randint(1, 4)):
        at = numbers.randrange(len(changed) + 1)
        end = at + numbers.randint(0, 20)
        what = numbers.randrange(4)
        if what == 0:
            changed[at:end] = numbers.choice(TOKENS)
        elif what == 1:
            changed[at:end] = numbers.randbytes(end - at)
        elif what == 2:
            changed[at:at] = changed[: end - at]
        else:
            del changed[at:]
    return bytes(changed)


def fuzz(form: str, root: Path, seed: int, seconds: float, most: int) -> None:
    """Read damaged files until the time or the number of tries is over."""
    name, write = FORMS[form]
    write(root)
    originals = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    files = sorted(originals)
    numbers = random.Random(seed)
    deadline = time.monotonic() + seconds
    for _ in range(most):
        if time.monotonic() > deadline:
            break
        file = numbers.choice(files)
        if file.suffix == ".gz" and numbers.random() < 0.8:
            # Damage below the compression, which would notice most damage itself.
            inside = damaged(gzip.decompress(originals[file]), numbers)
            file.write_bytes(gzip.compress(inside, 1))
        else:
            file.write_bytes(damaged(originals[file], numbers))
        try:
            load_dataset(name, root=root)
        except MotleyError as error:
            assert str(error)
        file.write_bytes(originals[file])


@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_are_read_or_refused(form: str, tmp_path: Path) -> None:
    fuzz(form, tmp_path, seed=1, seconds=1, most=60)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_for_a_minute(form: str, tmp_path: Path) -> None:
    fuzz(form, tmp_path, seed=2, seconds=SECONDS, most=1_000_000)
