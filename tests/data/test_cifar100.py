"""The reader of CIFAR-100, on small files in the released format and on the real ones."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets import cifar100
from motley.models import ImageShape

RNG = np.random.default_rng(0)


def content(fine: list[int], **changes: Any) -> dict[bytes, Any]:
    """Return the dict that one of the two released files holds."""
    count = len(fine)
    batch = {
        b"filenames": [f"{number}.png".encode() for number in range(count)],
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": fine,
        b"coarse_labels": [label // 5 for label in fine],
        b"data": RNG.integers(0, 256, (count, 3072), dtype=np.uint8),
    }
    batch.update({key.encode(): value for key, value in changes.items()})
    return batch


def write(folder: Path, train: Any, test: Any, protocol: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train").write_bytes(pickle.dumps(train, protocol))
    (folder / "test").write_bytes(pickle.dumps(test, protocol))
    return folder


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("folder", ["cifar-100-python", "cifar-100/cifar-100-python"])
def test_the_fine_labels_are_read(folder: str, protocol: int, tmp_path: Path) -> None:
    train, test = content([99, 0, 41]), content([7, 98])
    write(tmp_path / folder, train, test, protocol)
    data = load_dataset("cifar100", root=tmp_path)
    assert (data.classes, data.shape) == (100, ImageShape(3, 32, 32))
    assert data.train.targets.tolist() == [99, 0, 41] and data.test.targets.tolist() == [7, 98]
    rows = data.train.inputs.transpose(0, 3, 1, 2).reshape(3, -1)
    assert np.array_equal(rows, train[b"data"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_labels": [1, 100]}, "'fine_labels' must be a list of whole numbers in 0..99"),
        ({"fine_labels": [1, -1]}, "in 0..99"),
        ({"fine_labels": [True, 2]}, "whole numbers"),
        ({"fine_labels": "12"}, "must be a list"),
        ({"fine_labels": [1, 2, 3]}, "there are 2 images but 3 labels"),
        ({"data": RNG.integers(0, 256, (2, 3071), dtype=np.uint8)}, r"not uint8 \(2, 3071\)"),
    ],
)
def test_a_wrong_file_is_named_with_the_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "cifar-100-python", content([1, 2]), content([1, 2], **changes))
    with pytest.raises(MotleyError, match=message) as caught:
        load_dataset("cifar100", root=tmp_path)
    assert str(folder / "test") in str(caught.value)


def test_a_batch_of_cifar_10_is_not_mistaken_for_cifar_100(tmp_path: Path) -> None:
    batch = content([1, 2])
    batch[b"labels"] = batch.pop(b"fine_labels")
    write(tmp_path / "cifar-100-python", batch, batch)
    with pytest.raises(MotleyError, match=r"train is not a batch .* it has no 'fine_labels'"):
        load_dataset("cifar100", root=tmp_path)


def test_a_truncated_file_and_one_with_code_are_refused(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'victim'}",)

    folder = write(tmp_path / "cifar-100-python", content([1]), content([1]))
    (folder / "train").write_bytes(pickle.dumps(content([1], extra=Attack()), 2))
    with pytest.raises(MotleyError, match=r"train: refused to load .* Nothing was run"):
        load_dataset("cifar100", root=tmp_path)
    assert not (tmp_path / "victim").exists()
    (folder / "train").write_bytes(pickle.dumps(content([1]), 2)[:2000])
    with pytest.raises(MotleyError, match="train is truncated or damaged"):
        load_dataset("cifar100", root=tmp_path)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cifar-100-python", content([1]), content([1]))
    monkeypatch.setattr(cifar100, "MAX_BYTES", 99)
    with pytest.raises(MotleyError, match=r"train has .* at most 99"):
        load_dataset("cifar100", root=tmp_path)


@pytest.mark.slow
def test_real_cifar100(shared_data: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, shared_data / "restore.py", "cifar-100", tmp_path], check=True)
    data = load_dataset("cifar100", root=tmp_path)
    assert (len(data.train), len(data.test), data.shape) == (50_000, 10_000, ImageShape(3, 32, 32))
    assert np.bincount(data.train.targets).tolist() == [500] * 100
    assert np.bincount(data.test.targets).tolist() == [100] * 100
    mean = data.train.inputs.mean(axis=(0, 1, 2)) / 255
    assert np.allclose(mean, [0.5071, 0.4865, 0.4409], atol=1e-4)
