"""The reader of FEMNIST, on small files in both real formats, and the partition by writer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.dataset import Examples, load_dataset
from motley.data.datasets import femnist
from motley.data.partition import Natural, Partition
from motley.data.public import HeldOutSettings, deal
from motley.federation import Federation
from motley.models import ImageShape
from tests.conftest import tiny_config

RNG = np.random.default_rng(0)


def grey(count: int) -> np.ndarray:
    """Return images as both formats have them: bytes divided by 255."""
    return RNG.integers(0, 256, (count, 28, 28)) / 255


# --- LEAF


def leaf_file(writers: dict[str, tuple[np.ndarray, list[int]]], **changes: Any) -> str:
    content = {
        "users": list(writers),
        "num_samples": [len(labels) for _, labels in writers.values()],
        "user_data": {
            name: {"x": pixels.reshape(len(pixels), -1).tolist(), "y": labels}
            for name, (pixels, labels) in writers.items()
        },
    }
    return json.dumps({**content, **changes})


def write_leaf(root: Path, train: str, test: str, more: str = "") -> Path:
    folder = root / "femnist"
    for part, content in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True)
        (folder / part / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(content)
    if more:
        (folder / "train" / "all_data_1_niid_0_keep_0_train_9.json").write_text(more)
    return folder


def three_writers(root: Path) -> dict[str, np.ndarray]:
    """Write three writers with 2, 1 and 4 training images in two files."""
    pixels = {"f0002_1": grey(1), "f0001_7": grey(2), "f0003_3": grey(4)}
    first = {"f0002_1": (pixels["f0002_1"], [61]), "f0001_7": (pixels["f0001_7"], [0, 5])}
    second = {"f0003_3": (pixels["f0003_3"], [1, 2, 3, 4])}
    test = leaf_file({"f0001_7": (grey(1), [7])})
    write_leaf(root, leaf_file(first), test, leaf_file(second))
    return pixels


def test_leaf_files_are_read_with_their_writers(tmp_path: Path) -> None:
    pixels = three_writers(tmp_path)
    data = load_dataset("femnist", root=tmp_path)
    assert (data.classes, data.shape) == (62, ImageShape(1, 28, 28))
    assert data.train.targets.tolist() == [0, 5, 61, 1, 2, 3, 4]
    assert data.train.clients is not None and data.train.clients.tolist() == [0, 0, 1, 2, 2, 2, 2]
    stored = np.concatenate([pixels[name] for name in sorted(pixels)])
    assert np.array_equal(data.train.inputs[..., 0] / 255, stored)
    assert data.test.targets.tolist() == [7]


GOOD = {"w": (grey(2), [0, 1])}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is truncated or damaged"),
        (leaf_file(GOOD)[:-100], "is truncated or damaged"),
        ("[" * 100_000, "is truncated or damaged"),
        ('{"users": NaN}', "NaN is not a number of JSON"),
        ("[1, 2]", "it has no table 'user_data'"),
        (leaf_file(GOOD, users=["v"]), "name different writers"),
        (leaf_file(GOOD, users=["w", "w"]), "name different writers"),
        (leaf_file(GOOD, users=[["w"]]), "must be a list of names"),
        (leaf_file(GOOD, user_data={"w": {"x": []}}), "writer 'w' has no 'x' and 'y'"),
        (leaf_file({"w": (grey(2), [0, 62])}), "labels go from 0 to 62; they must be in 0..61"),
        (leaf_file({"w": (grey(2), [0, -1])}), "labels go from -1 to 0"),
        (leaf_file({"w": (grey(2), [0])}), r"not \(2, 28, 28\) and \(1,\)"),
        (leaf_file({"w": (grey(2)[:, :27], [0, 1])}), r"not \(2, 756\)"),
        (leaf_file({"w": (grey(2) * 255, [0, 1])}), r"grey values must be in \[0, 1\]"),
        (leaf_file(GOOD, user_data={"w": {"x": [], "y": []}}), "writer 'w'"),
        (leaf_file(GOOD, user_data={"w": {"x": [[0.5], [0.5, 1]], "y": [0, 1]}}), "'x' must be"),
        (leaf_file(GOOD, user_data={"w": {"x": [["a"] * 784], "y": [0]}}), "'x' must be numbers"),
        (leaf_file(GOOD, user_data={"w": {"x": [[0] * 784], "y": [0.5]}}), "whole numbers"),
        (leaf_file(GOOD, user_data={"w": {"x": [[0] * 784], "y": [10**30]}}), "'y' must be"),
        (leaf_file({}), "there are no writers in it"),
    ],
)
def test_wrong_leaf_files_are_named_with_the_reason(
    content: str, message: str, tmp_path: Path
) -> None:
    folder = write_leaf(tmp_path, content, leaf_file(GOOD))
    with pytest.raises(MotleyError, match=message) as caught:
        load_dataset("femnist", root=tmp_path)
    assert str(folder / "train") in str(caught.value)


def test_a_writer_in_two_files_and_a_folder_without_files_are_refused(tmp_path: Path) -> None:
    folder = write_leaf(tmp_path, leaf_file(GOOD), leaf_file(GOOD), leaf_file(GOOD))
    with pytest.raises(MotleyError, match="the writer 'w' occurs twice"):
        load_dataset("femnist", root=tmp_path)
    for file in (folder / "train").iterdir():
        file.unlink()
    with pytest.raises(MotleyError, match=r"train: there are no \.json files in it"):
        load_dataset("femnist", root=tmp_path)


def test_limits_on_files_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_leaf(tmp_path, leaf_file(GOOD), leaf_file(GOOD))
    monkeypatch.setattr(femnist, "MAX_IMAGES", 1)
    with pytest.raises(MotleyError, match="holds more than 1 images"):
        load_dataset("femnist", root=tmp_path)
    monkeypatch.setattr(femnist, "MAX_JSON_BYTES", 99)
    with pytest.raises(MotleyError, match="a file of LEAF has at most 99"):
        load_dataset("femnist", root=tmp_path)


# --- HDF5


@pytest.fixture
def h5py() -> Any:
    return pytest.importorskip("h5py", reason="needs the extra 'data' (h5py)")


def write_hdf5(h5py: Any, root: Path, writers: dict[str, tuple[Any, Any]]) -> Path:
    """Write the training file with these writers, and a test file with one."""
    folder = root / "femnist"
    folder.mkdir(exist_ok=True)
    for part, content in (("train", writers), ("test", {"w": (grey(1), [3])})):
        with h5py.File(folder / f"fed_emnist_{part}.h5", "w") as file:
            for name, (pixels, labels) in content.items():
                group = file.create_group(f"examples/{name}")
                group["pixels"] = np.asarray(pixels, np.float32)
                group["label"] = np.asarray(labels)
    return folder / "fed_emnist_train.h5"


def test_hdf5_files_are_read_with_their_writers(h5py: Any, tmp_path: Path) -> None:
    second, first = grey(3), grey(2)
    write_hdf5(h5py, tmp_path, {"f9_1": (second, [9, 8, 7]), "f0_1": (first, [61, 0])})
    data = load_dataset("femnist", root=tmp_path)
    assert data.train.targets.tolist() == [61, 0, 9, 8, 7] and data.test.targets.tolist() == [3]
    assert data.train.clients is not None and data.train.clients.tolist() == [0, 0, 1, 1, 1]
    expected = np.rint(np.concatenate([first, second]) * 255)
    assert np.array_equal(data.train.inputs[..., 0], expected)


def test_hdf5_labels_may_be_a_column(h5py: Any, tmp_path: Path) -> None:
    write_hdf5(h5py, tmp_path, {"w": (grey(2), [[4], [2]])})
    assert load_dataset("femnist", root=tmp_path).train.targets.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (grey(2), [0, 62], "labels go from 0 to 62"),
        (grey(2), [0], r"not \(2, 28, 28\) and \(1,\)"),
        (grey(2)[:, 1:], [0, 1], r"not \(2, 27, 28\)"),
        (grey(2) * 300, [0, 1], r"grey values must be in \[0, 1\]"),
        (np.full((1, 28, 28), np.nan), [0], r"grey values must be in \[0, 1\]"),
        (grey(1), [0.5], "labels whole numbers"),
        (grey(1), np.array([b"a"]), "its values must be numbers"),
        (grey(0), np.zeros(0, int), "there must be some"),
    ],
)
def test_wrong_hdf5_arrays_are_named(
    h5py: Any, pixels: Any, labels: Any, message: str, tmp_path: Path
) -> None:
    path = write_hdf5(h5py, tmp_path, {"w": (pixels, labels)})
    with pytest.raises(MotleyError, match=message) as caught:
        load_dataset("femnist", root=tmp_path)
    assert f"{path}: writer 'w'" in str(caught.value)


def test_hostile_hdf5_files_are_refused(h5py: Any, tmp_path: Path) -> None:
    path = write_hdf5(h5py, tmp_path, {"w": (grey(1), [0])})
    content = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(MotleyError, match=message) as caught:
            load_dataset("femnist", root=tmp_path)
        assert str(path) in str(caught.value)

    path.write_bytes(content[: len(content) // 2])
    refused("is truncated or damaged")
    path.write_bytes(b"not HDF5")
    refused("is truncated or damaged")
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["pixels"] = grey(1)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/w")
        group["pixels"] = h5py.ExternalLink(str(other), "/pixels")
        group["label"] = np.array([0])
    refused("is a link, which is not followed")
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/w")
        external = [(str(other), 0, 784 * 4)]
        group.create_dataset("pixels", (1, 28, 28), np.float32, external=external)
        group["label"] = np.array([0])
    refused("its values are in another file")
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/w")
        group.create_dataset("pixels", (10**9, 28, 28), np.float32, chunks=(1, 28, 28))
        group["label"] = np.array([0])
    refused("values are more than any writer has")
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/w")
        shape = (None, 28, 28)
        group.create_dataset(
            "pixels", (1, 28, 28), np.float32, maxshape=shape, chunks=(9**5, 28, 28)
        )
        group["label"] = np.array([0])
    refused("its chunks are larger")
    with h5py.File(path, "w") as file:
        file["examples"] = 1
    refused("/examples must be a group")
    with h5py.File(path, "w") as file:
        file["other"] = 1
    refused("has no 'examples'")


def test_the_extra_is_named_if_h5py_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "femnist").mkdir()
    for name in femnist.LAYOUT.files:
        (tmp_path / "femnist" / name).touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MotleyError, match=r"^data set 'femnist' needs h5py, .*'\.\[data\]'$"):
        load_dataset("femnist", root=tmp_path)


# --- the partition by writer


def natural(writers: np.ndarray, clients: int, seed: int = 1) -> Partition:
    return Natural().split_by_clients(np.zeros(len(writers), np.int64), writers, clients, seed)


def test_each_writer_is_a_client() -> None:
    partition = natural(np.array([0, 2, 2, 5, 0]), clients=3)
    assert [partition.of(client).tolist() for client in range(3)] == [[0, 4], [1, 2], [3]]


def test_fewer_clients_than_writers_are_drawn_by_the_seed() -> None:
    writers = np.repeat(np.arange(50), 3)
    drawn = natural(writers, clients=10)
    assert np.array_equal(drawn.indices, natural(writers, clients=10).indices)
    assert drawn.sizes.tolist() == [3] * 10
    for client in range(10):
        assert len(set(writers[drawn.of(client)])) == 1
    assert not np.array_equal(drawn.indices, natural(writers, clients=10, seed=2).indices)


def test_writers_that_are_missing_or_too_few_are_explained() -> None:
    with pytest.raises(MotleyError, match=r"federation\.clients = 4: should be 1 to 3, the number"):
        natural(np.array([0, 1, 2]), clients=4)
    with pytest.raises(MotleyError, match="the data set does not record whose examples they are"):
        Federation(tiny_config("data.partition.name=natural"))


def test_examples_refuse_writers_that_do_not_fit() -> None:
    with pytest.raises(MotleyError, match="clients must be int64"):
        Examples(np.zeros((2, 2, 2, 1), np.uint8), np.zeros(2, np.int64), np.zeros(3, np.int64))


def test_a_federation_of_writers(tmp_path: Path) -> None:
    three_writers(tmp_path)
    settings = ("data.name=femnist", f"data.root={tmp_path}", "data.partition.name=natural")
    federation = Federation(
        tiny_config(*settings, "federation.clients=3", "federation.clients_per_round=3")
    )
    assert federation.partition.sizes.tolist() == [2, 1, 4]


def test_public_examples_are_held_out_of_a_partition_by_writer() -> None:
    images = np.zeros((40, 2, 2, 1), np.uint8)
    train = Examples(images, np.arange(40) % 10, np.repeat(np.arange(4), 10))
    dealt = deal(train, 4, 1, Natural(), HeldOutSettings(samples=6))
    assert len(dealt.held_out) == 6 and not set(dealt.held_out) & set(dealt.partition.indices)
    assert len(dealt.partition.indices) == 34
    assert train.clients is not None
    for client in range(4):
        assert set(train.clients[dealt.partition.of(client)]) == {client}
