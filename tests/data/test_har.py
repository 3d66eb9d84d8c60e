"""The reader of UCI HAR, on small files in both forms."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.datasets.har import find_chains, hold_out_chains
from motley.models.inputs import SignalShape
from tests.data.natural_files import har_recordings, write_har_arrays, write_har_release


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("har")
    write_har_release(root)
    return root


def test_both_forms_give_the_same_examples(release: Path, tmp_path: Path) -> None:
    write_har_arrays(tmp_path)
    from_text = load_dataset("har", root=release)
    from_arrays = load_dataset("har", root=tmp_path)
    assert from_text.shape == SignalShape(9, 128)
    assert (from_text.classes, from_text.class_names[0]) == (6, "walking")
    for one, other in (
        (from_text.train, from_arrays.train),
        (from_text.test, from_arrays.test),
    ):
        assert np.array_equal(one.inputs, other.inputs)
        assert np.array_equal(one.targets, other.targets)
        assert np.array_equal(one.clients, other.clients)
    assert from_text.train.inputs.dtype == np.float32


def test_every_person_has_both_parts_and_no_chain_is_divided(tmp_path: Path) -> None:
    arrays = write_har_arrays(tmp_path)
    data = load_dataset("har", root=tmp_path)
    assert np.unique(data.train.clients).tolist() == [0, 1, 2]
    assert np.unique(data.test.clients).tolist() == [0, 1, 2]
    assert len(data.train) + len(data.test) == len(arrays["x"])
    halves = {window[:, :64].tobytes() for window in data.train.inputs}
    halves |= {window[:, 64:].tobytes() for window in data.train.inputs}
    for window in data.test.inputs:
        assert window[:, :64].tobytes() not in halves
        assert window[:, 64:].tobytes() not in halves


def test_chains_are_found_in_any_order_of_the_windows() -> None:
    arrays = har_recordings(2, 2)
    order = np.random.default_rng(0).permutation(len(arrays["x"]))
    found = find_chains(arrays["x"][order])
    pairs = np.unique(np.stack([arrays["chain"][order], found]), axis=1)
    assert pairs.shape[1] == len(np.unique(arrays["chain"])) == len(np.unique(found))


def test_constant_windows_end_a_chain() -> None:
    assert find_chains(np.zeros((3, 9, 128), np.float32)).shape == (3,)


def test_the_last_quarter_of_the_chains_is_held_out() -> None:
    chains = np.repeat(np.arange(8), 2)
    same = np.zeros(16, dtype=np.int64)
    held_out = hold_out_chains(same, same, chains)
    assert np.unique(chains[held_out]).tolist() == [6, 7]
    with pytest.raises(MotleyError, match="nobody has two separate recordings"):
        hold_out_chains(same, same, same)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train/y_train.txt", lambda text: text[:-2], "y_train.txt has 71 rows, but .* has 72"),
        ("train/y_train.txt", lambda text: text.replace("1\n", "7\n"), "activities go from 2 to 7"),
        ("test/y_test.txt", lambda text: "walking\n" + text, "y_test.txt is truncated or damaged"),
        ("test/subject_test.txt", lambda text: "", "subject_test.txt is empty"),
        ("test/subject_test.txt", lambda text: "3.5\n" + text[2:], "one whole number per line"),
        (
            "test/Inertial Signals/body_acc_x_test.txt",
            lambda text: text[: len(text) // 2],
            "body_acc_x_test.txt",
        ),
        (
            "test/Inertial Signals/body_gyro_z_test.txt",
            lambda text: "".join(text.splitlines(keepends=True)[:-1]),
            "must have 36 rows of 128 numbers.*; it has 35 rows",
        ),
        (
            "train/Inertial Signals/total_acc_y_train.txt",
            lambda text: " nan " + text.split(maxsplit=1)[1],
            "window 0 has values that are not finite",
        ),
    ],
)
def test_wrong_text_files_are_named(
    release: Path, tmp_path: Path, file: str, change: Callable[[str], str], message: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(release, root)
    path = root / "UCI HAR Dataset" / file
    path.write_text(change(path.read_text()))
    with pytest.raises(MotleyError, match=message):
        load_dataset("har", root=root)


def test_a_missing_signal_is_named(release: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(release, root)
    (root / "UCI HAR Dataset/train/Inertial Signals/total_acc_z_train.txt").unlink()
    with pytest.raises(MotleyError, match=r"total_acc_z_train.txt cannot be read"):
        load_dataset("har", root=root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((108, 9, 127), np.float32)}, r"x must be numbers of shape \(N, 9, 128\)"),
        ({"x": np.zeros((108, 9, 128), np.int64)}, "x must be numbers"),
        ({"y": np.zeros(7, np.int64)}, r"y must be whole numbers of shape \(108\)"),
        ({"y": np.full(108, 6)}, "activities go from 6 to 6"),
        ({"subject": np.zeros(108)}, "subject must be whole numbers"),
        ({"x": np.full((108, 9, 128), np.inf, np.float32)}, "window 0 has values"),
        ({"chain": np.array([None] * 108)}, "truncated or damaged"),
    ],
)
def test_wrong_arrays_are_named(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    write_har_arrays(tmp_path, **changes)
    with pytest.raises(MotleyError, match=message):
        load_dataset("har", root=tmp_path)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    write_har_arrays(tmp_path)
    file = tmp_path / "uci_har.npz"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MotleyError, match="truncated or damaged"):
        load_dataset("har", root=tmp_path)


def test_an_array_that_declares_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    write_har_arrays(tmp_path)
    header = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 9, 128)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(tmp_path / "uci_har.npz", "w") as archive:
        for name in ("x", "y", "subject", "chain"):
            archive.writestr(f"{name}.npy", header.getvalue())
    with pytest.raises(MotleyError, match=r"uci_har.npz"):
        load_dataset("har", root=tmp_path)


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_har_arrays(tmp_path)
    monkeypatch.setattr("motley.data.datasets.har.MAX_ARRAY_BYTES", 1000)
    with pytest.raises(MotleyError, match="more than the 1,000 bytes"):
        load_dataset("har", root=tmp_path)


def test_missing_files_are_listed_with_the_folders(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=r"subject_train.txt(.|\n)*motley data fetch har"):
        load_dataset("har", root=tmp_path)
