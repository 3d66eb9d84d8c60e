"""The reader of MNIST by writer, on small files in both forms."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.models.inputs import ImageShape
from tests.data.natural_files import (
    digits_by_writer,
    idx_bytes,
    qmnist_labels,
    write_qmnist,
    write_writers,
)


def test_both_forms_give_the_same_examples(tmp_path: Path) -> None:
    write_qmnist(tmp_path / "a")
    arrays = write_writers(tmp_path / "b")
    released = load_dataset("mnist-writers", root=tmp_path / "a")
    saved = load_dataset("mnist-writers", root=tmp_path / "b")
    assert (released.classes, released.shape) == (10, ImageShape(1, 28, 28))
    for one, other in ((released.train, saved.train), (released.test, saved.test)):
        assert np.array_equal(one.inputs, other.inputs)
        assert np.array_equal(one.targets, other.targets)
        assert np.array_equal(one.clients, other.clients)
    assert np.array_equal(saved.test.inputs[..., 0], arrays["x_test"])


def test_test_writers_are_numbered_after_the_training_writers(tmp_path: Path) -> None:
    write_writers(tmp_path)
    data = load_dataset("mnist-writers", root=tmp_path)
    assert data.train.clients is not None and data.test.clients is not None
    assert np.unique(data.train.clients).tolist() == [0, 1, 2, 3]
    assert np.unique(data.test.clients).tolist() == [4, 5]
    assert np.bincount(data.train.clients).tolist() == [12] * 4


def test_only_mnists_own_test_digits_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_qmnist(tmp_path)
    monkeypatch.setattr("motley.data.datasets.mnist_writers.MNIST_TEST_IMAGES", 5)
    assert len(load_dataset("mnist-writers", root=tmp_path).test) == 5


def test_a_writer_in_both_parts_is_refused(tmp_path: Path) -> None:
    write_writers(tmp_path, **digits_by_writer(first_test_writer=10))
    with pytest.raises(MotleyError, match="2 writers are in the training and in the test part"):
        load_dataset("mnist-writers", root=tmp_path)


LABELS = np.arange(48, dtype=np.int32) % 10


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-labels-idx2-int", idx_bytes(LABELS.astype(np.uint8)), "32-bit integers with 2"),
        ("train-labels-idx2-int", idx_bytes(np.zeros((48, 3), np.int32)), "8 numbers; its shape"),
        ("train-labels-idx2-int", idx_bytes(np.zeros((47, 8), np.int32)), "must have 48 rows"),
        ("train-labels-idx2-int", idx_bytes(qmnist_labels(LABELS, LABELS))[:-2], "is truncated"),
        ("train-labels-idx2-int", idx_bytes(qmnist_labels(LABELS + 1, LABELS)), "labels go from 1"),
        ("test-images-idx3-ubyte", idx_bytes(np.zeros((24, 32, 32), np.uint8)), "28 x 28 pixels"),
        ("test-images-idx3-ubyte", b"not an IDX file", "is not an IDX file of unsigned bytes"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    write_qmnist(tmp_path)
    (tmp_path / "qmnist" / f"qmnist-{file}.gz").write_bytes(gzip.compress(content))
    with pytest.raises(MotleyError, match=message):
        load_dataset("mnist-writers", root=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((48, 28, 28))}, "x_train must be whole numbers"),
        ({"x_train": np.zeros((48, 28, 28), np.uint16)}, "x_train must be uint8"),
        ({"writer_test": np.zeros(3, np.int16)}, "writer_test must be whole numbers of shape"),
        ({"y_test": np.full(24, 10)}, "labels go from 10 to 10"),
    ],
)
def test_wrong_arrays_are_named(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    write_writers(tmp_path, **changes)
    with pytest.raises(MotleyError, match=message):
        load_dataset("mnist-writers", root=tmp_path)
