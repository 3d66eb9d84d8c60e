"""The readers, on small files in the real formats, and on the real files if they are present."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from motley.cli.plan import costs_in
from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, Examples, data_root, load_dataset
from motley.data.datasets import digits
from motley.data.datasets import idx as idx_files
from motley.data.datasets.cifar10 import FOLDER, TEST_FILE, TRAIN_FILES, read_batch
from motley.data.datasets.idx import FILES, read_idx
from motley.federation import Federation
from motley.models import ImageShape
from tests.conftest import tiny_config

RNG = np.random.default_rng(0)


def images(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, classes: int = 10) -> np.ndarray:
    return np.arange(count, dtype=np.int64) % classes


# --- examples and data sets


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(2, 4, 4, 1).astype(np.float64), labels(2), "uint8"),
        (images(2, 4, 4), labels(2), "shape"),
        (images(2, 4, 4, 1), labels(2).astype(np.int32), "int64"),
        (images(2, 4, 4, 1), labels(3), "2 inputs but 3 targets"),
    ],
)
def test_examples_refuse_wrong_arrays(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        Examples(x, y)


def test_a_data_set_knows_its_shape_and_checks_its_labels() -> None:
    part = Examples(images(6, 5, 7, 3), labels(6, 3))
    assert Dataset("mine", part, part, 3).shape == ImageShape(3, 5, 7)
    with pytest.raises(MotleyError, match=r"0 to 2; with 2 classes"):
        Dataset("mine", part, part, 2)
    with pytest.raises(MotleyError, match="from -1"):
        Dataset("mine", part, Examples(images(1, 5, 7, 3), np.array([-1])), 3)
    with pytest.raises(MotleyError, match="test inputs"):
        Dataset("mine", part, Examples(images(1, 7, 5, 3), labels(1)), 3)
    with pytest.raises(MotleyError, match="train part is empty"):
        Dataset("mine", Examples(images(0, 5, 7, 3), labels(0)), part, 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_data_set_refuses_inputs_that_are_not_finite(value: float) -> None:
    whole = np.zeros((3, 2, 2, 1), np.float32)
    holed = whole.copy()
    holed[1, 0, 1, 0] = value
    good, bad = Examples(whole, labels(3, 2)), Examples(holed, labels(3, 2))
    for part, parts in (("train", (bad, good)), ("test", (good, bad))):
        with pytest.raises(MotleyError, match=f"input 1 of the {part} part holds a number that is"):
            Dataset("mine", *parts, 2)


def test_data_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("MOTLEY_DATA", "~/images")
    assert data_root() == tmp_path / "home" / "images"
    monkeypatch.setenv("MOTLEY_DATA", "")
    assert data_root() == tmp_path / "home" / ".cache" / "motley"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "motley"


def test_every_reader_is_registered_and_a_wrong_name_is_explained() -> None:
    assert {entry.name for entry in DATASETS} >= {"digits", "fashion-mnist", "cifar10", "npz"}
    with pytest.raises(MotleyError, match="Did you mean 'cifar10'"):
        load_dataset("cifar-10")


@pytest.mark.parametrize(
    "name", [entry.name for entry in DATASETS if entry.name not in ("npz", "files")]
)
def test_a_path_that_would_not_be_read_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="takes no path"):
        load_dataset(name, root=tmp_path, path=tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("name", "files", "folders"),
    [
        ("fashion-mnist", FILES, ["", "fashion-mnist", "FashionMNIST/raw"]),
        ("cifar10", (*TRAIN_FILES, TEST_FILE), [FOLDER, f"cifar-10/{FOLDER}", ""]),
    ],
)
def test_missing_files_are_named_with_the_places_and_the_remedy(
    name: str,
    files: tuple[str, ...],
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOTLEY_DATA", str(tmp_path))
    with pytest.raises(MotleyError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert all(file in message for file in files)
    assert all(f"  {tmp_path / folder}\n" in message for folder in folders)
    assert "export MOTLEY_DATA=" in message


# --- digits


def test_digits_are_split_the_same_way_always_and_within_each_class() -> None:
    first, second = load_dataset("digits"), load_dataset("digits")
    assert (len(first.train) + len(first.test), first.classes, first.shape) == (
        1797,
        10,
        ImageShape(1, 8, 8),
    )
    assert np.array_equal(first.test.inputs, second.test.inputs)
    assert first.train.inputs.max() == 255 and first.train.inputs.min() == 0
    in_test = np.bincount(first.test.targets)
    in_all = in_test + np.bincount(first.train.targets)
    assert np.abs(in_test - 0.2 * in_all).max() <= 0.5


def test_digits_are_those_of_scikit_learn() -> None:
    """The packaged file has all of its images in the same order, on which the split depends."""
    original = load_digits()
    with digits.FILE.open("rb") as file, np.load(file) as arrays:
        assert np.array_equal(arrays["images"], original.images)
        assert np.array_equal(arrays["labels"], original.target)


# --- Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_fashion(folder: Path, packed: bool) -> list[np.ndarray]:
    arrays = [
        images(12, 28, 28),
        labels(12).astype(np.uint8),
        images(5, 28, 28),
        labels(5).astype(np.uint8),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(FILES, arrays, strict=True):
        content = gzip.compress(idx(array)) if packed else idx(array)
        (folder / (file + (".gz" if packed else ""))).write_bytes(content)
    return arrays


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_reads_packed_and_plain_files(
    folder: str, packed: bool, tmp_path: Path
) -> None:
    x, y, x_test, y_test = write_fashion(tmp_path / folder, packed)
    data = load_dataset("fashion-mnist", root=tmp_path)
    assert data.shape == ImageShape(1, 28, 28)
    assert np.array_equal(data.train.inputs[..., 0], x) and np.array_equal(data.train.targets, y)
    assert np.array_equal(data.test.inputs[..., 0], x_test) and np.array_equal(
        data.test.targets, y_test
    )
    assert data.train.inputs.flags.writeable  # so that torch can share the memory


def test_a_folder_that_lacks_one_file_is_told_apart(tmp_path: Path) -> None:
    write_fashion(tmp_path, packed=False)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(MotleyError, match=rf"\(lacks {FILES[3]}\)"):
        load_dataset("fashion-mnist", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x0d\x03" + bytes(20), "starts with 00 00 0d 03"),
        (idx(images(2, 3)), "with 3 dimensions"),
        (idx(images(2, 3, 3))[:10], "ends inside its header"),
        (
            idx(images(2, 3, 3))[:-1],
            r"truncated: shape \(2, 3, 3\) needs 18 bytes and it holds 17",
        ),
        (idx(images(2, 3, 3)) + b"x", "extra bytes"),
    ],
)
def test_a_damaged_idx_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some-images"
    path.write_bytes(content)
    with pytest.raises(MotleyError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda raw: b"not gzip", lambda raw: raw[:20] + raw[40:]]
)
def test_a_damaged_gzip_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "some-images.gz"
    path.write_bytes(damage(gzip.compress(idx(images(5, 9, 9)))))
    with pytest.raises(MotleyError, match="truncated or damaged") as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ending", [".gz", ""])
def test_a_file_that_unpacks_to_too_much_is_refused(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = idx(np.zeros((100, 20, 20), np.uint8))
    path = tmp_path / f"some-images{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    assert read_idx(path, 3).shape == (100, 20, 20)
    monkeypatch.setattr(idx_files, "MAX_BYTES", 39_999)
    with pytest.raises(MotleyError, match=r"declares the shape .* more than the 39,999 bytes"):
        read_idx(path, 3)


def test_an_idx_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("absent", "absent.gz"):
        with pytest.raises(MotleyError, match=f"{name} cannot be read: .*No such file"):
            read_idx(tmp_path / name, 3)


def test_real_fashion_mnist(shared_data: Path) -> None:
    data = load_dataset("fashion-mnist", root=shared_data)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert np.bincount(data.train.targets).tolist() == [6000] * 10
    assert np.bincount(data.test.targets).tolist() == [1000] * 10


# --- CIFAR-10


def batch(count: int) -> dict[bytes, Any]:
    return {
        b"batch_label": b"a batch",
        b"labels": labels(count).tolist(),
        b"data": images(count, 3072),
    }


def python2_batch(rows: np.ndarray, classes: list[int]) -> bytes:
    """Write a batch as Python 2 did: protocol 2, byte strings, dtype('u1', 0, 1)."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"\x87R"
    )
    array += (
        b"("
        + number(1)
        + b"".join(map(number, rows.shape))
        + b"\x86"
        + dtype
        + b"\x89"
        + text(rows.tobytes())
    )
    array += b"tb"
    listed = b"](" + b"".join(map(number, classes)) + b"e"
    return b"\x80\x02}(" + text(b"labels") + listed + text(b"data") + array + b"u."


@pytest.mark.parametrize("folder", [FOLDER, f"cifar-10/{FOLDER}", "."])
def test_cifar10_reads_the_standard_folder(folder: str, tmp_path: Path) -> None:
    batches = [batch(4) for _ in range(6)]
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file, content in zip((*TRAIN_FILES, TEST_FILE), batches, strict=True):
        (tmp_path / folder / file).write_bytes(pickle.dumps(content, protocol=2))
    data = load_dataset("cifar10", root=tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (
        20,
        4,
        10,
        ImageShape(3, 32, 32),
    )
    rows = np.concatenate([content[b"data"] for content in batches[:5]])
    assert np.array_equal(data.train.inputs[7, 2, 3], rows[7].reshape(3, 32, 32)[:, 2, 3])
    assert np.array_equal(data.train.inputs.transpose(0, 3, 1, 2).reshape(20, -1), rows)
    assert data.test.targets.tolist() == batches[5][b"labels"]


def test_cifar10_reads_the_original_release_without_a_warning(tmp_path: Path) -> None:
    rows = images(3, 3072)
    path = tmp_path / "data_batch_1"
    path.write_bytes(python2_batch(rows, [3, 1, 9]))
    assert pickle.loads(path.read_bytes(), encoding="bytes")[b"labels"] == [3, 1, 9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = read_batch(path)
    assert np.array_equal(part.inputs.transpose(0, 3, 1, 2).reshape(3, -1), rows)
    assert part.targets.tolist() == [3, 1, 9]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifar10_reads_text_keys_and_later_protocols(protocol: int, tmp_path: Path) -> None:
    content = batch(2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(
        pickle.dumps({key.decode(): value for key, value in content.items()}, protocol=protocol)
    )
    assert read_batch(path).targets.tolist() == content[b"labels"]


class Attack:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("function", ["system", "eval", "exec", "getattr", "save"])
def test_a_malicious_pickle_is_refused_and_not_run(
    function: str, inside: bool, protocol: int, tmp_path: Path
) -> None:
    victim = tmp_path / "victim.npy"
    attack = {
        "system": Attack(os.system, f"touch {victim}"),
        "eval": Attack(eval, f"open({str(victim)!r}, 'w')"),
        "exec": Attack(exec, f"open({str(victim)!r}, 'w')"),
        "getattr": Attack(getattr, "", "join"),
        "save": Attack(np.save, str(victim), 1),
    }[function]
    path = tmp_path / "data_batch_1"
    path.write_bytes(
        pickle.dumps({**batch(2), b"extra": attack} if inside else attack, protocol=protocol)
    )
    with pytest.raises(MotleyError, match="refused to load") as caught:
        read_batch(path)
    assert str(path) in str(caught.value)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or damaged"),
        (pickle.dumps(batch(2), protocol=2)[:500], "truncated or damaged"),
        (pickle.dumps([1, 2], protocol=2), "holds a list"),
        (pickle.dumps({b"labels": [1]}, protocol=2), "has no 'data'"),
        (
            pickle.dumps({**batch(2), b"data": images(2, 100)}, protocol=2),
            r"\(N, 3072\), not uint8 \(2, 100\)",
        ),
        (pickle.dumps({**batch(2), b"labels": [1, 10]}, protocol=2), "in 0..9"),
        (pickle.dumps({**batch(2), b"labels": [1]}, protocol=2), "2 images but 1 labels"),
    ],
)
def test_a_damaged_cifar10_batch_is_explained(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(MotleyError, match=message):
        read_batch(path)


@pytest.mark.slow
def test_real_cifar10(shared_data: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, shared_data / "restore.py", "cifar-10", tmp_path], check=True)
    data = load_dataset("cifar10", root=tmp_path)
    assert (len(data.train), len(data.test), data.shape) == (50_000, 10_000, ImageShape(3, 32, 32))
    assert np.bincount(data.train.targets).tolist() == [5000] * 10
    assert np.bincount(data.test.targets).tolist() == [1000] * 10
    assert np.allclose(
        data.train.inputs.mean(axis=(0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=1e-4
    )


# --- the user's own arrays


def save(path: Path, **changes: Any) -> Path:
    arrays = {
        "x_train": images(9, 6, 5),
        "y_train": labels(9, 3),
        "x_test": images(4, 6, 5),
        "y_test": labels(4, 3),
    }
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        ((6, 5), ImageShape(1, 6, 5)),
        ((6, 5, 3), ImageShape(3, 6, 5)),
        ((6, 5, 4), ImageShape(4, 6, 5)),
        ((3, 6, 5), ImageShape(3, 6, 5)),
        ((1, 6, 5), ImageShape(1, 6, 5)),
        ((3, 5, 3), ImageShape(3, 3, 5)),
    ],
)
def test_npz_tells_the_layout_of_images(
    stored: tuple[int, ...], shape: ImageShape, tmp_path: Path
) -> None:
    x = images(9, *stored)
    data = load_dataset("npz", path=save(tmp_path / "mine.npz", x_train=x, x_test=x[:4]))
    assert (data.shape, data.classes) == (shape, 3)
    channels_first = stored[0] in (1, 3) and stored[-1] not in (1, 3)
    expected = np.moveaxis(x, 1, -1) if channels_first else x.reshape(data.train.inputs.shape)
    assert np.array_equal(data.train.inputs, expected)


def test_npz_scales_floats_between_zero_and_one(tmp_path: Path) -> None:
    x = images(9, 6, 5)
    path = save(
        tmp_path / "mine.npz",
        x_train=(x / 255).astype(np.float32),
        y_train=labels(9, 3).astype(np.uint8),
    )
    assert np.array_equal(load_dataset("npz", path=path).train.inputs[..., 0], x)


def ragged() -> np.ndarray:
    """Return images of different sizes, as NumPy stores them."""
    array = np.empty(9, dtype=object)
    for place in range(9):
        array[place] = images(1, 4 + place, 5)[0]
    return array


def test_floats_are_rounded_to_8_bits(tmp_path: Path) -> None:
    """docs/data.md says so, for users who need more than 256 grey levels."""
    x = np.full((9, 6, 5), 0.5012, np.float32)
    data = load_dataset("npz", path=save(tmp_path / "mine.npz", x_train=x))
    assert (data.train.inputs == 128).all()
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert "rounded to 8 bits" in " ".join(page.split())


@pytest.mark.parametrize(
    ("y_train", "message"),
    [
        (
            labels(9, 3) + 1,
            r"'npz': labels 1\.\.3: class 0 has no example\. .* subtract 1 from all labels\.",
        ),
        (
            labels(9, 3) * 500_000,
            r"mine\.npz: the largest label 1000000 makes 1,000,001 classes, more than the 13 examples",
        ),
        (labels(9, 3) * 300, r"'npz': labels 0\.\.600 make 601 classes, and 598 of them have no"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(
    y_train: np.ndarray, message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "mine.npz", y_train=y_train, y_test=y_train[:4])
    with pytest.raises(MotleyError, match=message):
        Federation(tiny_config("data.name=npz", f"data.path={path}"))
    with pytest.raises(MotleyError, match=message):
        costs_in(tiny_config("data.name=npz", f"data.path={path}"))
    load_dataset("npz", path=path, tested=False)  # a node may hold only some of the classes


def test_a_gap_between_labels_is_allowed(tmp_path: Path) -> None:
    path = save(
        tmp_path / "mine.npz", y_train=np.array([0, 1, 3] * 3), y_test=np.array([0, 1, 3, 1])
    )
    data = load_dataset("npz", path=path)
    data.check_inferred_classes()
    assert data.classes == 4
    part = Examples(images(2, 4, 4, 1), np.array([7, 8]))
    Dataset(
        "mine", part, part, 10
    ).check_inferred_classes()  # the caller states the number of classes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None, "x_test": None}, r"lacks x_test, y_test\. It holds: x_train, y_train"),
        (
            {"x_train": images(9, 6, 5).astype(np.float32)},
            r"x_train has floats .* must be in \[0, 1\]",
        ),
        ({"x_train": np.full((9, 6, 5), np.nan)}, r"must be in \[0, 1\]"),
        ({"x_train": images(9, 6, 5).astype(np.int64)}, "not int64"),
        ({"x_train": images(9, 6)}, r"not \(9, 6\)"),
        (
            {"x_train": ragged()},
            r"mine\.npz: x_train is an array of Python objects.* All images must have one size",
        ),
        (
            {"y_train": np.array(["a"] * 9, dtype=object)},
            r"y_train is an array of Python objects.* Labels must be whole",
        ),
        ({"y_train": labels(9) / 2}, "y_train must be whole numbers"),
        ({"y_train": labels(8)}, "9 inputs but 8 targets"),
        ({"y_train": labels(9) - 1}, r"y_train, row 0: the label -1 is outside 0\.\."),
        ({"y_test": labels(4) + 10**15}, r"y_test, row 0: the label 10{15} is outside 0\.\."),
    ],
)
def test_npz_explains_what_is_wrong(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=message):
        load_dataset("npz", path=save(tmp_path / "mine.npz", **changes))


def test_npz_explains_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="needs a path"):
        load_dataset("npz")
    with pytest.raises(MotleyError, match="there is no file"):
        load_dataset("npz", path=tmp_path / "absent.npz")
    wrong = {
        "empty.npz": b"",
        "table.csv": b"label,pixel0,pixel1",
        "zip.npz": b"PK\x03\x04broken",
        "a.pkl": b"\x80\x04.",
    }
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            MotleyError, match=rf"{name} is not a \.npz file, or is truncated: .* np\.savez"
        ) as raised:
            load_dataset("npz", path=tmp_path / name)
        assert "pickle" not in str(raised.value)
    with pytest.raises(
        MotleyError,
        match=r"is a folder; data set 'npz' reads one file\. Save four arrays with np\.savez",
    ):
        load_dataset("npz", path=tmp_path)
    whole = save(tmp_path / "whole.npz").read_bytes()
    (tmp_path / "damaged.npz").write_bytes(whole.replace(b"\x93NUMPY", b"\x93NUMMY"))
    with pytest.raises(MotleyError, match=r"damaged\.npz"):
        load_dataset("npz", path=tmp_path / "damaged.npz")
    with zipfile.ZipFile(tmp_path / "folder.npz", "w") as archive:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(key, "hello")
    with pytest.raises(MotleyError, match="x_train is not an array saved by NumPy"):
        load_dataset("npz", path=tmp_path / "folder.npz")
    np.save(tmp_path / "single.npy", images(3, 4, 4))
    with pytest.raises(MotleyError, match="a single array"):
        load_dataset("npz", path=tmp_path / "single.npy")
