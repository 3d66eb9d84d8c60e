"""Predictions for files: the same numbers as in evaluation, and clear words about wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import motley
from motley.config import load_config
from motley.core.errors import MotleyError
from motley.data.device import device_data
from motley.data.files.delimited import read_delimited
from motley.data.files.settings import FileSettings
from motley.data.transforms import TransformSettings
from motley.export.files import read_inputs
from motley.export.inputs import InputFormat
from motley.export.loading import LoadedRun
from motley.export.predict import Predictor
from motley.export.rows import RowReader
from motley.models.inputs import ImageShape, SignalShape, TableShape, TokenShape
from motley.runs.run import start_run
from tests.cli.conftest import call
from tests.conftest import tiny_config
from tests.export.conftest import FAST, Export

PLAIN = TransformSettings()
GREY = InputFormat(ImageShape(1, 8, 8), "uint8", PLAIN)


@pytest.fixture
def digits(run: Path) -> np.ndarray:
    return LoadedRun(run).dataset.test.inputs[:3]


def expected_classes(run: Path, size: str, count: int) -> list[tuple[str, float]]:
    """Return the classes and probabilities of the first test examples, as evaluation sees them."""
    loaded = LoadedRun(run)
    transform = loaded.config.data.transform
    data = device_data(loaded.dataset.test, transform, torch.device("cpu"), augment=False)
    with torch.no_grad():
        logits = loaded.model(size)(data.batch(torch.arange(count))[0])
    best = logits.softmax(1).max(1)
    return [
        (str(number), probability)
        for number, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


# ---- the command


def test_images_and_arrays_give_the_classes_of_the_evaluation(
    run: Path, digits: np.ndarray, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    files = [tmp_path / "0.png", tmp_path / "1.bmp", tmp_path / "one.npy", tmp_path / "all.npz"]
    image.fromarray(digits[0, :, :, 0]).save(files[0])
    image.fromarray(digits[1, :, :, 0]).convert("RGB").save(files[1])
    np.save(files[2], digits[2])
    np.savez(files[3], inputs=digits, targets=np.arange(3))
    answer = call("predict", run, "--size", "mlp2", *files, "--json")
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)
    assert [row["input"] for row in rows] == [
        *map(str, files[:3]),
        *(f"{files[3]}[{number}]" for number in range(3)),
    ]
    expected = expected_classes(run, "mlp2", 3)
    for row, (label, probability) in zip(rows, [*expected, *expected], strict=True):
        assert row["classes"][0]["class"] == label
        assert row["classes"][0]["probability"] == pytest.approx(probability, abs=1e-5)


def test_a_table_lists_the_most_probable_classes(
    run: Path, exports: dict[str, Export], digits: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "digits.npy", digits)
    outputs = []
    for path in (run, exports["onnx"].folder, exports["safetensors"].folder):
        answer = call("predict", path, "--size", "mlp2", tmp_path / "digits.npy", "--top", "3")
        assert answer.code == 0, answer.err
        outputs.append(answer.out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(f"digits.npy[{number}]" in outputs[0] for number in range(3))
    assert outputs[0].count("%") == 9


def test_an_exported_model_needs_no_data_set(
    exports: dict[str, Export], digits: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_data(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the data set was loaded")

    monkeypatch.setattr("motley.export.loading.load_dataset_of", no_data)
    for folder, _ in exports.values():
        assert len(motley.load(folder).predict(digits)) == 3


def test_examples_stop_at_a_confident_exit(exits_run: Path, tmp_path: Path) -> None:
    loaded = LoadedRun(exits_run)
    np.save(tmp_path / "digits.npy", loaded.dataset.test.inputs[:6])
    arguments = ("predict", exits_run, "--size", loaded.sizes[-1], tmp_path / "digits.npy")
    rows = json.loads(call(*arguments, "--exit-threshold", "0", "--json").out)
    assert [row["exit"] for row in rows] == [1] * 6
    answer = call(*arguments, "--exit-threshold", "0")
    assert "exit 1: 6, exit 2: 0, exit 3: 0; mean cost" in answer.out
    plain = json.loads(call(*arguments, "--json").out)
    late = json.loads(call(*arguments, "--exit-threshold", "1", "--json").out)
    assert [row["exit"] for row in late] == [3] * 6
    assert [row["classes"][0]["class"] for row in late] == [
        row["classes"][0]["class"] for row in plain
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "mlp", "x.npy"), "--size: unknown size 'mlp'. Did you mean 'mlp"),
        (("x.npy",), "--size: is needed; the run has mlp1, mlp2."),
        (("--size", "mlp1", "missing.npy"), "missing.npy: there is no such file."),
        (("--size", "mlp1", "config.toml"), "config.toml: has an unknown ending."),
        (("--size", "mlp1", "x.npy", "--exit-threshold", "0.5"), "this model has no early exit"),
    ],
)
def test_wrong_predictions_are_refused(
    run: Path,
    digits: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", digits)
    Path("config.toml").touch()
    answer = call("predict", run, *options)
    assert answer.code == 2 and words in answer.err


# ---- files


def test_declared_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "huge.npy"
    np.save(file, np.zeros((8, 8), np.uint8))
    content = file.read_bytes().replace(b"'shape': (8, 8), ", b"'shape': (8" + b"0" * 5 + b",),  ")
    assert len(content) >= 128
    file.write_bytes(content)
    assert "cannot be read" in said(file)


def said(path: Path, inputs: InputFormat = GREY) -> str:
    with pytest.raises(MotleyError) as raised:
        read_inputs(path, inputs)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_arrays_of_other_shapes_and_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    wrong: dict[str, np.ndarray] = {
        "has shape (5, 5); the model takes images of shape (8, 8, 1), or several": np.zeros((5, 5)),
        "has shape (2, 3, 8, 8)": np.zeros((2, 3, 8, 8), np.uint8),
        "has shape ()": np.array(3),
        "has shape (0, 8, 8, 1): there is no input in it": np.zeros((0, 8, 8, 1)),
        "pixels from 0 to 7; floating-point pixels must be in 0 to 1": np.eye(8) * 7,
        "pixels from -1 to 0; allowed are 0 to 255": np.full((8, 8), -1),
        "a value that is not finite": np.full((8, 8), np.nan),
        "not numbers": np.full((8, 8), "a"),
    }
    for words, array in wrong.items():
        np.save(file, array)
        assert words in said(file)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    for name in ("x.npy", "x.npz", "x.png"):
        file = tmp_path / name
        for content in (b"", b"no such thing", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x89PNG\r\n"):
            file.write_bytes(content)
            assert "cannot be read" in said(file)
    np.save(tmp_path / "x.npy", np.array([print], dtype=object), allow_pickle=True)
    assert "cannot be read" in said(tmp_path / "x.npy")
    header = b"{'descr': (" + b" " * 20
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header)
    assert "cannot be read" in said(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", a=np.zeros(3), b=np.zeros(3))
    assert "has the arrays a, b; call the inputs 'inputs'" in said(tmp_path / "x.npz")


def test_images_of_another_size_are_scaled_only_if_asked(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file = tmp_path / "x.png"
    image.new("RGB", (30, 20), (255, 255, 255)).save(file)
    assert "is 30x20 pixels, and the data set's images are 8x8. --resize scales it" in said(file)
    array = read_inputs(file, GREY, resize=True)
    assert array.shape == (1, 8, 8, 1) and array.dtype == np.uint8 and array.min() == 255
    colour = InputFormat(ImageShape(3, 8, 8), "float32", PLAIN)
    assert read_inputs(file, colour, resize=True).max() == 1.0


def test_images_with_16_bits_are_refused(tmp_path: Path) -> None:
    """Pillow cuts them off at 255, so almost all of them would become white."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(0, 64 * 1024, 1024, dtype=np.uint16).reshape(8, 8)
    image.fromarray(pixels).save(tmp_path / "x.png")
    message = "has pixels of the type 'I;16'; save it with 8 bits per channel"
    assert message in said(tmp_path / "x.png")
    image.fromarray(pixels.astype(np.float32) / 65535).save(tmp_path / "x.tif")
    assert "has pixels of the type 'F'" in said(tmp_path / "x.tif")


def test_grey_images_need_no_channel() -> None:
    images = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
    assert GREY.read_array(images, "x").shape == (2, 8, 8, 1)
    assert GREY.read_array(images[0], "x").shape == (1, 8, 8, 1)
    floats = GREY.read_array(images / 255, "x")
    torch.testing.assert_close(GREY.prepare(floats), GREY.prepare(images.reshape(2, 8, 8, 1)))


def test_numbers_beyond_0_to_1_are_used_as_the_data_set_has_them(tmp_path: Path) -> None:
    """A byte does not stand for any of them: it would be divided by 255, which nobody asked for."""
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    images = generator.normal(size=(90, 8, 8, 1)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=np.arange(90) % 3)
    settings = (
        "data.name=files",
        f"data.path={tmp_path / 'own.npz'}",
        "data.transform.resize=0",
        "data.partition.name=iid",
        "model.sizes=['mlp1']",
        "training.rounds=1",
    )
    start_run(load_config(preset="digits-small", overrides=(*FAST, *settings)), tmp_path / "run")
    assert call("export", tmp_path / "run", "-o", tmp_path / "out").code == 0
    np.save(tmp_path / "new.npy", images[:2])
    image.new("L", (8, 8)).save(tmp_path / "new.png")
    for folder in (tmp_path / "run", tmp_path / "out"):
        loaded = motley.load(folder)
        with torch.no_grad():
            expected = loaded.model("mlp1")(torch.from_numpy(images[:2]).permute(0, 3, 1, 2))
        predictions = loaded.predict(images[:2], "mlp1")
        found = torch.tensor([prediction.outputs for prediction in predictions])
        torch.testing.assert_close(found, expected)
        answer = call("predict", folder, tmp_path / "new.npy", "--json")
        assert answer.code == 0 and len(json.loads(answer.out)) == 2
        answer = call("predict", folder, tmp_path / "new.png")
        assert answer.code == 2 and "numbers that are not in 0 to 1" in answer.err
    assert "take the data set's numbers" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_that_normalizes_with_its_batch_needs_several_inputs(tmp_path: Path) -> None:
    settings = ("model.sizes=['resnet10']", "model.resnet.width=0.125", "training.rounds=1")
    by_batch = "split.normalization_statistics=batch"
    start_run(tiny_config(*FAST, *settings, by_batch), tmp_path / "run")
    loaded = LoadedRun(tmp_path / "run")
    images = loaded.dataset.test.inputs[:3]
    files = []
    for number, image in enumerate(images):
        files.append(tmp_path / f"{number}.npy")
        np.save(files[-1], image)
    assert call("export", tmp_path / "run", "-o", tmp_path / "out").code == 0
    with torch.no_grad():
        expected = loaded.model("resnet10")(loaded.inputs.prepare(images)).softmax(1).amax(1)
    for folder in (tmp_path / "run", tmp_path / "out"):
        answer = call("predict", folder, *files, "--json")
        assert answer.code == 0, answer.err
        found = [row["classes"][0]["probability"] for row in json.loads(answer.out)]
        torch.testing.assert_close(torch.tensor(found), expected)
        answer = call("predict", folder, files[0])
        assert answer.code == 2 and "it cannot predict for one input alone" in answer.err
    assert "never a single one" in (tmp_path / "out" / "README.md").read_text()
    # 257 inputs are two batches, neither of which has a single input.
    many = np.concatenate([loaded.dataset.test.inputs, images])[:257]
    assert len(loaded.predict(many, "resnet10")) == 257


# ---- other inputs


def test_rows_of_a_table_are_read_from_csv(tmp_path: Path) -> None:
    table = InputFormat(TableShape(2, (3,)), "float32", PLAIN)
    file = tmp_path / "rows.csv"
    file.write_text("age,weight,kind\n61,80.5,2\n40,70,0\n")
    np.testing.assert_array_equal(read_inputs(file, table), [[61, 80.5, 2], [40, 70, 0]])
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("age\tweight\tkind\n61\t80.5\t2\n")
    np.testing.assert_array_equal(read_inputs(tabs, table), [[61, 80.5, 2]])
    wrong = {
        "": "has no line of numbers",
        "a,b\n1,2\n": "has shape (1, 2); the model takes rows of a table of shape (3,)",
        "1,2,0\n1,x,0\n": "line 2: has a cell that is not a number",
        "1,?,0\n1,2,0\n": "line 1: has a cell that is not a number",
        "1,2,0\n1,2\n": "line 2: has 2 cells, and the lines before it have 3",
        "1,2,3\n": "column 2: category 3: must be one of 0 to 2",
        "1,2,0.5\n": "column 2: category 0.5: must be one of 0 to 2",
    }
    for text, words in wrong.items():
        file.write_text(text)
        assert words in said(file, table)


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on the user's own table, with numbers that are standardized and categories."""
    folder = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(0)
    lines = ["age,colour,weight,label"]
    for number in range(120):
        age, weight = generator.normal(50, 10), generator.normal(70, 5)
        colour = ("red", "green", "blue")[number % 3]
        lines.append(f"{age:.2f},{colour},{weight:.2f},{'yes' if age > 50 else 'no'}")
    (folder / "table.csv").write_text("\n".join(lines))
    settings = (
        "data.name=files",
        f"data.path={folder / 'table.csv'}",
        "model.sizes=['table1']",
        "training.rounds=1",
        "data.partition.name=iid",
    )
    start_run(load_config(preset="digits-small", overrides=(*FAST, *settings)), folder / "run")
    return folder / "run"


def test_rows_of_the_users_own_table_are_encoded_as_in_training(
    table_run: Path, tmp_path: Path
) -> None:
    """The order of the columns does not matter, the target may be missing, and colours are words."""
    loaded = LoadedRun(table_run)
    file = tmp_path / "new.csv"
    file.write_text("weight,age,colour\n70,61.5,green\n66,40,violet\n")
    table = read_delimited(table_run.parent / "table.csv")
    age, weight = table.columns["age"].values, table.columns["weight"].values
    rows = read_inputs(file, loaded.inputs, loaded.rows)
    assert rows.shape == (2, 3)
    assert rows[0, 0] == pytest.approx((61.5 - age.mean()) / age.std(), abs=0.2)
    assert rows[0, 1] == pytest.approx((70 - weight.mean()) / weight.std(), abs=0.2)
    assert rows[:, 2].tolist() == [2, 0]  # blue, green, red; an unknown category is 0
    assert call("export", table_run, "-o", tmp_path / "out").code == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| colour | 0 for others; 1: blue, 2: green, 3: red |" in text
    assert "| age | (value - " in text
    here = call("predict", table_run, file, "--json")
    there = call("predict", tmp_path / "out", file, "--json")
    assert here.code == 0 and here.out == there.out
    assert {row["classes"][0]["class"] for row in json.loads(here.out)} <= {"yes", "no"}
    file.write_text("weight,colour\n70,green\n")
    answer = call("predict", tmp_path / "out", file)
    assert answer.code == 2 and "new.csv: lacks the column 'age'" in answer.err
    file.write_text("weight,age,colour\n70,,green\n")
    answer = call("predict", tmp_path / "out", file)
    assert answer.code == 2 and "new.csv, line 2, column 'age': has no value" in answer.err


def test_a_table_that_has_changed_since_the_training_is_refused(tmp_path: Path) -> None:
    """Further rows shift the mean, by which the rows to predict would be standardized."""
    lines = ["size,colour,label"]
    for number in range(60):
        lines.append(f"{number % 7},{('red', 'green')[number % 2]},{('no', 'yes')[number % 2]}")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines))
    settings = (
        "data.name=files",
        f"data.path={table}",
        "model.sizes=['table1']",
        "training.rounds=1",
        "data.partition.name=iid",
    )
    start_run(load_config(preset="digits-small", overrides=(*FAST, *settings)), tmp_path / "run")
    assert call("export", tmp_path / "run", "-o", tmp_path / "out").code == 0
    (tmp_path / "new.csv").write_text("size,colour\n3,red\n")
    before = call("predict", tmp_path / "out", tmp_path / "new.csv", "--json")
    table.write_text("\n".join([*lines, *["900,red,no"] * 5]))
    for command in (
        ("predict", tmp_path / "run", tmp_path / "new.csv"),
        ("export", tmp_path / "run"),
    ):
        answer = call(*command)
        assert answer.code == 2 and "table.csv: has changed since" in answer.err
    after = call("predict", tmp_path / "out", tmp_path / "new.csv", "--json")
    assert after.code == 0 and after.out == before.out


def test_the_end_of_a_text_is_read_as_numbers(tmp_path: Path) -> None:
    file = tmp_path / "play.txt"
    file.write_text("xabba!")
    written = RowReader(FileSettings(), vocabulary=("a", "b")).to_json()
    rows = RowReader.from_json(json.loads(json.dumps(written)), FileSettings())
    tokens = InputFormat(TokenShape(4, 3), "int64", PLAIN)
    assert read_inputs(file, tokens, rows).tolist() == [[2, 2, 1, 0]]
    tokens = InputFormat(TokenShape(7, 3), "int64", PLAIN)
    with pytest.raises(MotleyError, match=r"has 6 characters, and the model reads sequences of 7"):
        read_inputs(file, tokens, rows)


def test_tokens_and_signals_are_checked() -> None:
    tokens = InputFormat(TokenShape(4, 10), "int64", PLAIN)
    assert tokens.prepare(tokens.read_array(np.array([1, 2, 3, 9]), "x")).dtype == torch.int64
    with pytest.raises(MotleyError, match=r"x: token 10: must be one of 0 to 9"):
        tokens.read_array(np.array([[1, 2, 3, 10]]), "x")
    with pytest.raises(MotleyError, match=r"x: holds float64; token numbers must be integers"):
        tokens.read_array(np.zeros((1, 4)), "x")
    signals = InputFormat(SignalShape(2, 5), "float32", PLAIN)
    assert signals.prepare(signals.read_array(np.zeros((2, 5)), "x")).shape == (1, 2, 5)


def test_predictions_of_other_tasks() -> None:
    signals = InputFormat(SignalShape(2, 5), "float32", PLAIN)
    regression = Predictor(lambda x: x.mean((1, 2)).unsqueeze(1), signals, "regression", ())
    (prediction,) = regression.predict(np.full((2, 5), 3.0))
    assert prediction.classes == () and prediction.outputs == (3.0,)
    tokens = InputFormat(TokenShape(4, 10), "int64", PLAIN)
    repeat = Predictor(
        lambda x: 9.0 * torch.nn.functional.one_hot(x, 10).float(), tokens, "next-token", ()
    )
    (prediction,) = repeat.predict(np.array([1, 2, 3, 7]))
    assert prediction.classes[0][0] == "7"
