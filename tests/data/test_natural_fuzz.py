"""Damaged files of the named data sets: a reader returns a data set or raises MotleyError.

The short run is part of the usual tests. `pytest -m slow -s tests/data/test_natural_fuzz.py` reads
damaged files of each form for a minute, and prints how many there were.
"""

from __future__ import annotations

import gzip
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets import cifar10, cinic10
from tests.data import test_cifar100, test_cinic10, test_femnist, test_mnist, test_svhn
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


def write_cifar10(root: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    batch = {b"labels": [1, 9, 4], b"data": pixels}
    folder = root / cifar10.FOLDER
    folder.mkdir()
    for number, name in enumerate((*cifar10.TRAIN_FILES, cifar10.TEST_FILE)):
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2 + number % 4))


def write_cifar100(root: Path) -> None:
    train, test = test_cifar100.content([99, 0, 41]), test_cifar100.content([7, 98])
    test_cifar100.write(root / "cifar-100-python", train, test)


def write_svhn(root: Path) -> None:
    test_svhn.save(root / "svhn" / "train_32x32.mat")
    test_svhn.save(root / "svhn" / "test_32x32.mat", compressed=False)


def write_cinic10(root: Path) -> None:
    for part in ("train", "test"):
        for name in cinic10.CLASSES:
            folder = root / "cinic-10" / part / name
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(test_cinic10.png())


def write_hdf5(root: Path) -> None:
    import h5py

    writers = {"f9_1": (test_femnist.grey(2), [9, 8]), "f0_1": (test_femnist.grey(1), [61])}
    test_femnist.write_hdf5(h5py, root, writers)


#: Form -> the data set, and what writes its files.
FORMS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "har text": ("har", lambda root: write_har_release(root, people=2)),
    "har arrays": ("har", write_har_arrays),
    "qmnist": ("mnist-writers", write_qmnist),
    "writers": ("mnist-writers", write_writers),
    "heart": ("heart", write_heart),
    "texts": ("shakespeare", write_texts),
    "leaf": ("shakespeare", lambda root: write_leaf(root, divided=True)),
    "idx": ("mnist", lambda root: test_mnist.write(root / "mnist")),
    "cifar10": ("cifar10", write_cifar10),
    "cifar100": ("cifar100", write_cifar100),
    "mat5": ("svhn", write_svhn),
    "cinic10": ("cinic10", write_cinic10),
    "femnist leaf": ("femnist", test_femnist.three_writers),
    "femnist hdf5": ("femnist", write_hdf5),
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


class Counts(NamedTuple):
    """Damaged files, and how many of them were refused."""

    files: int
    refused: int


def fuzz(form: str, root: Path, seed: int, seconds: float, most: int) -> Counts:
    """Read damaged files until the time or the number of tries is over."""
    name, write = FORMS[form]
    write(root)
    originals = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    files = sorted(originals)
    numbers = random.Random(seed)
    deadline = time.monotonic() + seconds
    tried = refused = 0
    while tried < most and time.monotonic() < deadline:
        file = numbers.choice(files)
        if file.suffix == ".gz" and numbers.random() < 0.8:
            # Damage below the compression, which would notice most damage itself.
            inside = damaged(gzip.decompress(originals[file]), numbers)
            file.write_bytes(gzip.compress(inside, 1))
        else:
            file.write_bytes(damaged(originals[file], numbers))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                load_dataset(name, root=root)
            except MotleyError as error:
                assert str(root) in str(error) or name in str(error)
                refused += 1
        tried += 1
        file.write_bytes(originals[file])
    return Counts(tried, refused)


@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_are_read_or_refused(form: str, tmp_path: Path) -> None:
    counts = fuzz(form, tmp_path, seed=1, seconds=1, most=60)
    assert counts.refused


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_damaged_files_for_a_minute(form: str, tmp_path: Path) -> None:
    counts = fuzz(form, tmp_path, seed=2, seconds=SECONDS, most=1_000_000)
    print(f"{form}: {counts.files} files, {counts.refused} refused")
    assert counts.refused
