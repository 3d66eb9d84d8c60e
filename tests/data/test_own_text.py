"""The user's own texts and arrays, and the choice of a format."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.files.reading import Reading, format_of, read_files
from motley.data.files.settings import FileSettings
from motley.models.inputs import ArrayShape, ImageShape, SignalShape, TableShape, TokenShape


def read(path: Path, **settings: Any) -> Reading:
    return read_files(path, FileSettings(**settings))


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(MotleyError) as caught:
        read(path, **settings)
    return str(caught.value)


# ---- text


def test_one_text_is_cut_into_windows(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abcd" * 25 + "z" * 4 + "abcd" * 4)
    data = read(path, sequence_length=5).dataset
    assert (data.task, data.shape) == ("next-token", TokenShape(5, 5))
    assert data.classes == 5 and data.train.clients is None
    # 96 of 120 characters are for training: 19 windows of 5 and the character after each.
    assert data.train.inputs.shape == data.train.targets.shape == (19, 5)
    assert data.train.inputs[1].tolist() == [2, 3, 4, 1, 2]
    assert data.train.targets[1].tolist() == [3, 4, 1, 2, 3]
    # "z" is not in the training text.
    assert (data.test.inputs == 0).sum() == 4


def test_one_text_per_client(tmp_path: Path) -> None:
    for name, count in (("romeo", 100), ("juliet", 60), ("guard", 8)):
        (tmp_path / f"{name}.txt").write_text("ab\r\n" * count, newline="")
    reading = read(tmp_path, sequence_length=10)
    assert reading.format == "text" and reading.client_names == ("guard", "juliet", "romeo")
    clients = reading.dataset.train.clients
    assert clients is not None and np.bincount(clients).tolist() == [1, 14, 23]
    assert reading.dataset.shape == TokenShape(10, 4)
    assert "sequence_length = 500" in refused(tmp_path, sequence_length=500)
    few = read(tmp_path, sequence_length=30)
    assert few.notes == ("texts that are too short for an example (1): guard",)


def test_train_and_test_texts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.txt").write_text("abc" * 20)
    reading = read(tmp_path, sequence_length=10)
    assert not reading.held_out and len(reading.dataset.test) == 5
    (tmp_path / "empty.txt").write_text("")
    assert "is empty" in refused(tmp_path / "empty.txt")
    assert "does not fit this format" in refused(tmp_path, task="regression")


# ---- arrays


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


LABELS = np.arange(20) % 4


@pytest.mark.parametrize(
    ("inputs", "asked", "shape"),
    [
        (np.zeros((20, 6, 5), np.uint8), "auto", ImageShape(1, 6, 5)),
        (np.zeros((20, 3, 6, 5), np.float32), "auto", ImageShape(3, 6, 5)),
        (np.zeros((20, 6, 5)), "auto", SignalShape(6, 5)),
        (np.zeros((20, 6, 5)), "image", ImageShape(1, 6, 5)),
        (np.zeros((20, 7), np.float16), "auto", TableShape(7)),
        (np.zeros((20, 7), np.int16), "tokens", TokenShape(7, 1)),
        (np.zeros((20, 7), np.int16), "table", TableShape(7)),
        (np.zeros((20, 2, 3, 4, 5)), "auto", ArrayShape((2, 3, 4, 5))),
        (np.zeros(20), "auto", TableShape(1)),
    ],
)
def test_arrays_of_any_shape(inputs: np.ndarray, asked: str, shape: object, tmp_path: Path) -> None:
    path = save(tmp_path / "mine.npz", x_train=inputs, y_train=LABELS)
    data = read(path, inputs=asked).dataset
    assert data.shape == shape and data.classes == 4 and len(data.test) == 4


def test_arrays_with_clients_names_and_a_test_part(tmp_path: Path) -> None:
    names = np.array(["b", "a", "b", "c"])
    path = save(
        tmp_path / "mine.npz",
        x_train=np.random.default_rng(0).normal(size=(20, 3)),
        y_train=np.array(["no ", " yes"] * 10),
        clients_train=np.repeat(names, 5),
        x_test=np.ones((2, 3)),
        y_test=np.array(["yes", "yes"]),
        clients_test=np.array(["a", "d"]),
    )
    reading = read(path)
    assert reading.client_names == ("a", "b", "c", "d")
    assert reading.dataset.class_names == ("no", "yes")
    assert reading.dataset.test.targets.tolist() == [1, 1]
    regression = save(tmp_path / "r.npz", x_train=np.ones((20, 3)), y_train=np.ones((20, 2)))
    assert (read(regression).dataset.task, read(regression).dataset.classes) == ("regression", 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_train": np.zeros((20, 3), np.int32)},
            "inputs = image, signal, tokens, table or array",
        ),
        ({"x_train": np.full((20, 3), np.nan)}, "example 0: the value nan at (0, 0) is not finite"),
        ({"x_train": np.full((20, 3), 1e300)}, "is too large for single precision"),
        ({"x_train": np.array(["a"] * 20)}, "inputs must be numbers"),
        ({"x_train": np.zeros((20, 0))}, "there are no values in it"),
        ({"y_train": np.arange(19)}, "x_train has 20 examples and y_train has the shape (19,)"),
        ({"y_train": np.full(20, 2**63, np.uint64)}, "the label 9223372036854775808 is outside"),
        ({"y_train": LABELS - 1}, "example 0 of the train part: the label -1 is outside"),
        ({"y_train": np.full(20, np.inf)}, "is not finite"),
        ({"clients_train": np.arange(3)}, "clients_train must have the shape (20,)"),
        ({"x_test": np.zeros((2, 3))}, "x_test and y_test must be there together"),
        ({"x_test": np.zeros((2, 4)), "y_test": np.zeros(2, int)}, "test inputs are"),
        ({"y_train": np.array([{}] * 20)}, "which is not read because it is a pickle"),
    ],
)
def test_arrays_that_are_refused(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    usual = {"x_train": np.zeros((20, 3)), "y_train": LABELS}
    assert message in refused(save(tmp_path / "mine.npz", **{**usual, **arrays}))


def test_tokens_take_the_larger_vocabulary(tmp_path: Path) -> None:
    tokens = np.arange(60).reshape(20, 3)
    path = save(
        tmp_path / "mine.npz",
        x_train=tokens,
        y_train=tokens,
        x_test=tokens[:2] + 20,
        y_test=tokens[:2],
    )
    data = read(path, inputs="tokens", task="next-token").dataset
    assert data.shape == TokenShape(3, 60) and data.classes == 60
    assert "tokens go from -1" in refused(
        save(tmp_path / "mine.npz", x_train=tokens - 1, y_train=tokens), inputs="tokens"
    )


# ---- formats


def test_formats_are_recognised(tmp_path: Path) -> None:
    for name, content, expected in (
        ("a.csv", b"x", "csv"),
        ("a.TSV", b"x", "csv"),
        ("a.ndjson", b"x", "jsonl"),
        ("a.pq", b"x", "parquet"),
        ("noending", b"PAR1", "parquet"),
        ("other.zip", b"PK\x03\x04", "npz"),
    ):
        (tmp_path / name).write_bytes(content)
        assert format_of(tmp_path / name) == expected
    (tmp_path / "what").write_bytes(b"hello")
    assert "data.files.format" in refused(tmp_path / "what")
    assert format_of(tmp_path / "what", "csv") == "csv"


def test_pickles_are_refused_without_being_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    for name in ("data.pkl", "weights.pt", "noending"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        assert "looks like a pickle" in refused(tmp_path / name)
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=np.array([Trap()] * 3), y_train=np.zeros(3, int))
    assert "pickle" in refused(path)
    assert not (tmp_path / "sprung").exists()
