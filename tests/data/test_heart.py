"""The reader of Fed-Heart-Disease, on small files in UCI's format and on the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets.heart import read_hospital, stratified_split
from motley.models.inputs import TableShape
from tests.data.natural_files import write_heart

ROW = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,{}\n"


def test_columns_and_labels(tmp_path: Path) -> None:
    file = tmp_path / "processed.va.data"
    incomplete = ROW.format(1).replace("145.0", "?")
    without_left_out_columns = ROW.format(3).replace("3.0,0.0,6.0", "?,?,?")
    file.write_text(2 * ROW.format(0) + incomplete + 2 * without_left_out_columns)
    patients, labels = read_hospital(file)
    # Chest pain 1 has no indicator; ECG result 2 is the last column.
    expected = [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1]
    assert patients.tolist() == [expected] * 4
    assert labels.tolist() == [0, 0, 1, 1]


def test_hospitals_are_clients_with_both_parts(tmp_path: Path) -> None:
    write_heart(tmp_path)
    data = load_dataset("heart", root=tmp_path)
    assert (data.shape, data.classes) == (TableShape(13, ()), 2)
    assert data.train.clients is not None and data.test.clients is not None
    assert np.bincount(data.train.clients).tolist() == [19] * 4
    assert np.bincount(data.test.clients).tolist() == [11] * 4


def test_columns_are_standardized_by_the_hospitals_own_training_part(tmp_path: Path) -> None:
    write_heart(tmp_path)
    data = load_dataset("heart", root=tmp_path)
    for hospital in range(4):
        inputs = data.train.inputs[data.train.clients == hospital]
        assert np.allclose(inputs.mean(axis=0), 0, atol=1e-6)
        # The indicators at the end may be constant among so few patients.
        assert np.allclose(inputs[:, :8].std(axis=0, ddof=1), 1, atol=1e-6)


def test_pooled_columns_are_standardized_by_all_training_parts(tmp_path: Path) -> None:
    write_heart(tmp_path)
    own, pooled = load_dataset("heart", root=tmp_path), load_dataset("heart-pooled", root=tmp_path)
    assert np.allclose(pooled.train.inputs.mean(axis=0), 0, atol=1e-6)
    assert np.allclose(pooled.train.inputs.std(axis=0, ddof=1), 1, atol=1e-6)
    assert np.array_equal(own.train.targets, pooled.train.targets)
    assert not np.allclose(own.train.inputs, pooled.train.inputs)


def test_a_constant_column_is_only_centred(tmp_path: Path) -> None:
    write_heart(tmp_path)
    file = tmp_path / "heart-disease" / "processed.switzerland.data"
    rows = []
    for line in file.read_text().splitlines():
        cells = line.split(",")
        cells[4] = "0"
        rows.append(",".join(cells))
    file.write_text("\n".join(rows))
    data = load_dataset("heart", root=tmp_path)
    switzerland = data.test.inputs[data.test.clients == 2]
    assert (switzerland[:, 3] == 0).all()
    assert np.abs(data.test.inputs).max() < 20


def test_the_split_is_scikit_learns() -> None:
    """FLamby calls train_test_split; the same patients must be held out."""
    selection = pytest.importorskip("sklearn.model_selection")
    random = np.random.default_rng(0)
    for count in (303, 261, 46, 130, 20):
        for positive in (0.5, 0.9, 0.02):
            labels = (random.random(count) < positive).astype(np.int64)
            enough = np.bincount(labels, minlength=2).min() > 2
            train, test = selection.train_test_split(
                np.arange(count),
                train_size=0.66,
                test_size=1 - 0.66,
                random_state=43,
                stratify=labels if enough else None,
            )
            our_train, our_test = stratified_split(labels)
            assert np.array_equal(np.sort(train), our_train)
            assert np.array_equal(np.sort(test), our_test)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW.format(0) + ROW.format(1)[:20] + "\n", "row 2 has 5 values; it must have 14"),
        (ROW.format(0) + ROW.format("sick"), "row 2: could not convert"),
        (3 * ROW.format(0) + ROW.format(5), "the diagnosis, must be in 0..4"),
        (ROW.format(0) + ROW.format(0).replace("63.0", "inf"), "row 2 has a value that is not"),
        (3 * ROW.format(0) + ROW.format(0).replace("0,1.0,1.0", "0,1.0,9.0"), "column cp holds 9"),
        (3 * ROW.format(0), "3 complete rows; at least 4"),
        ("", "0 complete rows"),
        ("\xff" * 10, "is damaged"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    write_heart(tmp_path)
    file = tmp_path / "heart-disease" / "processed.hungarian.data"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(MotleyError, match=f"processed.hungarian.data.*{message}"):
        load_dataset("heart", root=tmp_path)


def test_the_real_files_have_flambys_counts(shared_data: Path) -> None:
    data = load_dataset("heart", root=shared_data)
    assert data.train.clients is not None and data.test.clients is not None
    assert np.bincount(data.train.clients).tolist() == [199, 172, 30, 85]
    assert np.bincount(data.test.clients).tolist() == [104, 89, 16, 45]
    assert np.isfinite(data.train.inputs).all()
