"""The user's own tables: CSV, TSV, JSON lines, Parquet and Hugging Face's folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from motley.core.errors import MotleyError
from motley.data import from_datasets
from motley.data.files.reading import Reading, read_files
from motley.data.files.settings import FileSettings
from motley.models.inputs import ImageShape, SignalShape, TableShape, TokenShape

ROWS = [(20 + i, "mf"[i % 2], f"h{i % 3}", "ill" if i % 4 == 0 else "well") for i in range(60)]
NAMES = ("age", "sex", "hospital", "outcome")
HEADER = ",".join(NAMES)


def csv_text(rows: Sequence[Sequence[object]] = ROWS, header: str = HEADER, mark: str = ",") -> str:
    lines = [mark.join(map(str, row)) for row in rows]
    return "\n".join([header.replace(",", mark), *lines]) + "\n"


def write(folder: Path, text: str, name: str = "mine.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def read(path: Path, **settings: Any) -> Reading:
    return read_files(path, FileSettings(**{"target": "outcome", **settings}))


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(MotleyError) as caught:
        read(path, **settings)
    return str(caught.value)


# ---- CSV


def test_a_csv_with_a_client_column_gives_natural_clients(tmp_path: Path) -> None:
    reading = read(write(tmp_path, csv_text()), client="hospital")
    data = reading.dataset
    assert data.shape == TableShape(1, (3,))
    assert (data.task, data.classes, data.class_names) == ("classification", 2, ("ill", "well"))
    assert reading.client_names == ("h0", "h1", "h2")
    assert data.train.clients is not None and data.test.clients is not None
    assert np.bincount(data.train.clients).tolist() == [16, 16, 16]
    assert np.bincount(data.test.clients).tolist() == [4, 4, 4]
    assert set(data.train.targets) == {0, 1}
    # Numbers are standardized over the training rows; category 0 is for unknown ones.
    assert abs(data.train.inputs[:, 0].mean()) < 1e-6
    assert abs(data.train.inputs[:, 0].std() - 1) < 1e-6
    assert set(data.train.inputs[:, 1]) == {1.0, 2.0}


def test_the_held_out_rows_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path, csv_text())
    first, again, other = (
        read(path, client="hospital", standardize=False, test_seed=seed).dataset.test.inputs
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_training_and_test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    data = read(write(tmp_path, csv_text()), standardize=False).dataset
    ages = np.concatenate([data.train.inputs[:, 0], data.test.inputs[:, 0]])
    assert sorted(ages) == [float(row[0]) for row in ROWS]
    for examples in (data.train, data.test):
        for row, target in zip(examples.inputs, examples.targets, strict=True):
            # Columns: age, sex (f, m are 1, 2), hospital.
            _, sex, _, outcome = ROWS[int(row[0]) - 20]
            assert (row[1], data.class_names[target]) == ("fm".index(sex) + 1, outcome)


@pytest.mark.parametrize(
    ("encoding", "end", "mark"),
    [
        ("utf-8-sig", "\n", ","),
        ("utf-16", "\r\n", "\t"),
        ("utf-8", "\r", ";"),
        ("utf-8", "\r\n", "|"),
    ],
)
def test_encodings_line_ends_and_delimiters(
    encoding: str, end: str, mark: str, tmp_path: Path
) -> None:
    text = csv_text(mark=mark).replace("\n", end).replace("well", "gesünd")
    data = read(write(tmp_path, text, encoding=encoding), client="hospital").dataset
    assert data.class_names == ("gesünd", "ill") and len(data.train) == 48


def test_quotes_blanks_and_numbers_as_labels(tmp_path: Path) -> None:
    text = 'x,"the, name",label\n' + "".join(
        f'{i},"a ""b"", {i % 2}\n", {"1.0" if i % 2 else " 2 "}\n' for i in range(20)
    )
    reading = read(write(tmp_path, text), target="label")
    assert reading.dataset.class_names == ("1", "2")
    assert [column.name for column in reading.columns] == ["x", "the, name", "label"]


def test_labels_that_are_numbers_are_sorted_by_value(tmp_path: Path) -> None:
    text = "x,label\n" + "".join(f"{i},{[2, 10, 9, 1][i % 4]}\n" for i in range(40))
    assert read(write(tmp_path, text), target="").dataset.class_names == ("1", "2", "9", "10")


def test_a_tsv_without_a_header(tmp_path: Path) -> None:
    text = csv_text(mark="\t").split("\n", 1)[1]
    data = read(write(tmp_path, text, "mine.tsv"), header=False, target="4", client="3").dataset
    assert data.class_names == ("ill", "well") and data.shape == TableShape(1, (3,))


def test_fractions_make_a_regression(tmp_path: Path) -> None:
    text = "x,y\n" + "".join(f"{i},{i / 4}\n" for i in range(20))
    data = read(write(tmp_path, text), target="y").dataset
    assert (data.task, data.classes, data.train.targets.dtype) == ("regression", 1, np.float32)
    assert data.train.targets.ndim == 1 and len(data.test) == 4
    whole = "x,y\n" + "".join(f"{i},{i}\n" for i in range(20))
    asked = read(write(tmp_path, whole), target="y", task="regression").dataset
    assert asked.task == "regression"
    message = refused(write(tmp_path, text.replace("2.5", "big")), target="y", task="regression")
    assert "line 12: the target 'big' is not a number" in message


def test_a_test_file_uses_the_training_files_numbers(tmp_path: Path) -> None:
    train = write(tmp_path, csv_text())
    test = write(tmp_path, f"{HEADER}\n30,x,h9,well\n50,f,h0,ill\n", "test.csv")
    reading = read(train, test=str(test), client="hospital", standardize=False)
    data = reading.dataset
    assert data.test.inputs.tolist() == [[30, 0], [50, 1]]  # "x" is unknown
    assert data.test.targets.tolist() == [1, 0]
    assert reading.client_names == ("h0", "h1", "h2", "h9")
    assert data.test.clients is not None and data.test.clients.tolist() == [3, 0]


def test_missing_values(tmp_path: Path) -> None:
    rows = [*ROWS, ("NA", "m", "h0", "ill"), (30, " ", "h1", "well"), ("?", "f", "h2", "well")]
    path = write(tmp_path, csv_text(rows))
    message = refused(path)
    assert "line 62: column 'age' has no value; 2 of 63 rows lack it" in message
    assert "'drop'" in message and "'mean'" in message
    dropped = read(path, missing="drop")
    assert len(dropped.dataset.train) + len(dropped.dataset.test) == 60
    assert dropped.notes == ("3 rows with missing values are left out",)
    filled = read(path, missing="mean").dataset
    inputs = np.concatenate([filled.train.inputs, filled.test.inputs])
    assert len(inputs) == 63 and np.isfinite(inputs).all() and (inputs[:, 1] == 0).sum() == 1
    no_label = write(tmp_path, csv_text([*ROWS, (1, "m", "h0", "")]))
    assert "line 62: the target (column 'outcome') has no value" in refused(
        no_label, missing="mean"
    )


def test_numbers_that_are_categories(tmp_path: Path) -> None:
    data = read(write(tmp_path, csv_text()), categories=("age",), drop=("sex", "hospital")).dataset
    assert isinstance(data.shape, TableShape) and data.shape.numbers == 0
    assert data.shape.categories[0] > 40


def test_whole_numbers_are_the_same_categories_with_and_without_a_point(tmp_path: Path) -> None:
    """A column is written with 3.0 by pandas if it lacks a value somewhere, else with 3."""
    rows = [("" if i == 7 else f"{i % 3}.0", "ill" if i % 3 else "well") for i in range(30)]
    train = write(tmp_path, csv_text(rows, header="code,outcome"))
    test = write(tmp_path, "code,outcome\n2,ill\n0,well\n2.0,ill\n7,ill\n,ill\n", "test.csv")
    data = read(train, test=str(test), categories=("code",), missing="mean").dataset
    assert data.shape == TableShape(0, (4,))
    assert data.train.inputs[:3].tolist() == [[1], [2], [3]] and data.train.inputs[7] == 0
    assert data.test.inputs.tolist() == [[3], [1], [3], [0], [0]]


def test_features_and_unnamed_columns(tmp_path: Path) -> None:
    rows = [(i, *row) for i, row in enumerate(ROWS)]
    path = write(tmp_path, csv_text(rows, header=f",{HEADER}"))
    reading = read(path)
    assert reading.notes == ("columns without a name are not used: column 1",)
    assert read(path, features=("age",)).dataset.shape == TableShape(1)
    assert read(path, features=("age",), inputs="signal").dataset.shape == SignalShape(1, 1)


def test_a_text_column_as_characters(tmp_path: Path) -> None:
    text = "words,label\n" + "".join(f"{'ab' * (i % 5)}c,{i % 2}\n" for i in range(20))
    data = read(write(tmp_path, text), target="label", inputs="text", sequence_length=6).dataset
    assert data.shape == TokenShape(6, 4)
    assert data.train.inputs.shape[1:] == (6,) and data.train.inputs.max() == 3


REFUSED: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "blank": ("\n\n  \n", "is empty: it has only blank lines"),
    "header only": (f"{HEADER}\n", "has a header line and no rows"),
    "no header": ("1,2,3\n4,5,6\n", r"the first line has only numbers .*header = false"),
    "twice": (f"age,{HEADER}\n", "the column name 'age' occurs twice, as columns 1 and 2"),
    "short row": (f"{HEADER}\n1,m,h0,ill\n2,f,h1\n", "line 3: has 3 values and the first line 4"),
    "text in numbers": (
        csv_text([*ROWS, ("old", "m", "h0", "ill")]),
        "line 62, column 'age': 'old' is not a number",
    ),
    "underscore": (csv_text([*ROWS, ("1_0", "m", "h0", "ill")]), "'1_0' is not a number"),
    "infinite": (
        csv_text([*ROWS, ("inf", "m", "h0", "ill")]),
        "line 62, column 'age': 'inf' is not a finite number",
    ),
    "overflow": (csv_text([*ROWS, ("1e400", "m", "h0", "ill")]), "is not a finite number"),
    "large": (
        csv_text([*ROWS, ("1e300", "m", "h0", "ill")]),
        "too large (to compute with|for single precision)",
    ),
    "null": ("a,outcome\n\0,1\n", "is not a text file: it has a null byte at position 10"),
    "one class": (csv_text([row for row in ROWS if row[3] == "ill"]), r"only one class \('ill'\)"),
    "quote": ('a,outcome\n1,"2\n3,4\n', "line 3: unexpected end of data"),
    "names": (
        "name,outcome\n" + "".join(f"person {i},{i % 2}\n" for i in range(200)),
        "column 'name' has 160 different texts in 160 rows",
    ),
    "identifiers": (
        "x,outcome\n" + "".join(f"{i},{i}\n" for i in range(200)),
        "200 different labels in 200 examples do not look like classes",
    ),
    "two rows": (f"{HEADER}\n1,m,h0,ill\n2,m,h0,well\n", "leaves no example for testing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_csv_is_refused_with_place_and_reason(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    path = write(tmp_path, text)
    with pytest.raises(MotleyError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_wrong_names_of_columns_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, csv_text())
    for key in ("target", "client"):
        assert "Did you mean 'hospital'?" in refused(path, **{key: "hospitl"})
    for key in ("features", "categories", "drop"):
        assert f"data.files.{key} = 'agee': there is no such column" in refused(
            path, **{key: ("agee",)}
        )
    assert "which column is the target? By their names none is" in refused(path, target="")
    assert "cannot be both" in refused(path, client="outcome")
    assert "is the target" in refused(path, features=("outcome",))
    many = write(tmp_path, ",".join(f"c{i}" for i in range(5000)) + "\n" + "1," * 4999 + "1\n")
    assert len(refused(many, target="d")) < 600


def test_a_file_in_another_encoding_is_refused_or_read_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path, csv_text().replace("well", "gesünd"), encoding="latin-1")
    assert "cannot be decoded" in refused(path) and "data.files.encoding" in refused(path)
    assert read(path, encoding="latin-1").dataset.class_names == ("gesünd", "ill")
    plain = write(tmp_path, csv_text(), encoding="utf-16-le")
    assert "data.files.encoding = 'utf-16'" in refused(plain)


def test_test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train = write(tmp_path, csv_text())
    unknown = write(tmp_path, f"{HEADER}\n30,f,h0,dead\n", "class.csv")
    message = refused(train, test=str(unknown))
    assert "class.csv, line 2: the label 'dead' of the test part is not one of the 2" in message
    lacking = write(tmp_path, "age,sex,outcome\n30,f,ill\n", "column.csv")
    assert "has no column 'hospital', which" in refused(train, test=str(lacking))
    texts = write(tmp_path, f"{HEADER}\nold,f,h0,ill\n", "texts.csv")
    assert "column 'age' has numbers in" in refused(train, test=str(texts))
    assert "there is no file" in refused(train, test=str(tmp_path / "absent.csv"))


def test_thousands_of_columns(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(3000))
    row = ",".join(map(str, range(3000)))
    text = f"{names},label\n" + "".join(f"{row},{i % 2}\n" for i in range(10))
    data = read(write(tmp_path, text), target="label").dataset
    assert data.shape == TableShape(3000)


def test_one_client_with_one_row_keeps_it_for_training(tmp_path: Path) -> None:
    reading = read(write(tmp_path, csv_text([*ROWS, (3, "m", "h7", "ill")])), client="hospital")
    clients = reading.dataset.train.clients
    assert clients is not None and np.bincount(clients)[3] == 1


def test_each_client_holds_out_its_share_of_every_class(tmp_path: Path) -> None:
    rows = [(i, "m", f"h{i % 2}", "abc"[i // 2 % 3]) for i in range(120)]
    for seed in range(5):
        data = read(write(tmp_path, csv_text(rows)), client="hospital", test_seed=seed).dataset
        assert data.test.clients is not None
        cells = np.bincount(3 * data.test.clients + data.test.targets)
        assert cells.tolist() == [4] * 6


def test_a_rare_class_stays_in_the_training_part(tmp_path: Path) -> None:
    rows = [*ROWS, (3, "m", "h0", "rare")]
    for seed in range(5):
        data = read(write(tmp_path, csv_text(rows)), client="hospital", test_seed=seed).dataset
        assert data.class_names == ("ill", "rare", "well")
        assert 1 in data.train.targets


# ---- JSON lines


def jsonl(records: Sequence[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


RECORDS = [dict(zip(NAMES, row, strict=True)) for row in ROWS]


def test_json_lines_are_read_as_the_same_table(tmp_path: Path) -> None:
    from_csv = read(write(tmp_path, csv_text()), client="hospital").dataset
    path = write(tmp_path, "\n" + jsonl(RECORDS), "mine.jsonl")
    data = read(path, client="hospital").dataset
    assert np.array_equal(data.train.inputs, from_csv.train.inputs)
    assert np.array_equal(data.test.targets, from_csv.test.targets)


def test_json_lists_labels_and_missing_values(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"x": [i, 0.5, 2], "label": i % 2 == 0} for i in range(20)]
    data = read(write(tmp_path, jsonl(records), "a.jsonl"), target="label").dataset
    assert data.shape == TableShape(3) and data.class_names == ("false", "true")
    tokens = [{"x": [i, 0, 2], "label": "ab"[i % 2]} for i in range(20)]
    path = write(tmp_path, jsonl(tokens), "a.jsonl")
    assert "may be tokens, pixels or measurements" in refused(path, target="label")
    assert read(path, target="label", inputs="tokens").dataset.shape == TokenShape(3, 20)
    lacking = [*RECORDS, {"sex": "m", "hospital": "h0", "outcome": "ill"}]
    path = write(tmp_path, jsonl(lacking), "a.jsonl")
    assert "line 61: column 'age' has no value" in refused(path)
    assert "NaN" in path.read_text().replace("h0", "NaN")  # NaN is read as a missing value
    assert len(read(path, missing="mean").dataset.train) > 40


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("{", "line 61: is not a JSON record"),
        ("[1]", "is not a record"),
        ('{"age": {"years": 3}}', "line 61, column 'age': nested objects are not read"),
        ('{"age": "old"}', "mixed types: a number in line 1 and a text in line 61"),
        ('{"age": 1e999}', "is not a finite number"),
        ('{"age": 1' + "0" * 400 + "}", "is not a finite number"),
        ('{"age": 1' + "0" * 5000 + "}", "is not a JSON record"),
        ('{"weight": 3}', "the key 'weight' is not in the first record"),
        ('{"age": 3, "age": 4}', "the key 'age' occurs twice"),
        ("[" * 100_000, "line 61: is not a JSON record"),
    ],
)
def test_a_bad_record_is_refused_with_its_line(last: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, jsonl(RECORDS) + last + "\n", "mine.jsonl")
    assert message in refused(path)


# ---- Parquet and Hugging Face's folders


def arrow_table() -> pa.Table:
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(NAMES)}
    return pa.table(columns)


def test_parquet_is_read_as_the_same_table(tmp_path: Path) -> None:
    from_csv = read(write(tmp_path, csv_text()), client="hospital").dataset
    table = arrow_table()
    table = table.set_column(1, "sex", table.column("sex").dictionary_encode())
    pq.write_table(table, tmp_path / "mine.parquet", row_group_size=7)
    data = read(tmp_path / "mine.parquet", client="hospital").dataset
    assert np.array_equal(data.train.inputs, from_csv.train.inputs)
    assert np.array_equal(data.test.targets, from_csv.test.targets)


def test_types_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "flag": [True, None, False] * 10,
            "signal": [[[0.5, 1.0], [2.0, 3.0]]] * 30,
            "when": pa.array([0] * 30, pa.timestamp("s")),
            "label": pa.array([2**62, 5, 2**62 + 1] * 10, pa.int64()),
        }
    )
    path = tmp_path / "mine.parquet"
    pq.write_table(table, path)
    assert "column 'when': values of the type 'timestamp[ms]' are not read" in refused(
        path, target="label"
    )
    data = read(path, target="label", features=("signal",)).dataset
    assert data.shape == SignalShape(2, 2)
    # 64-bit labels are not rounded to doubles.
    assert data.class_names == ("5", str(2**62), str(2**62 + 1))
    message = refused(path, target="label", drop=("when",))
    assert "row 2: column 'flag' has no value" in message
    message = refused(path, target="label", drop=("when",), missing="mean")
    assert "column 'signal' holds arrays and cannot be combined" in message
    assert "row 2: column 'flag' has no value; 10 of 30" in refused(
        path, target="label", features=("flag",)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0], [1.0]] * 10, "the list in row 2 has 1 values and the one in row 1 2"),
        ([[1.0], [float("nan")]] * 10, "row 2: has a value that is not finite"),
        ([[1.0], None] * 10, "row 2: is missing"),
        ([["a"], ["b"]] * 10, "lists must hold numbers"),
        ([{"a": 1}] * 20, "are not read"),
        ([float("inf")] * 20, "row 1: is not a finite number"),
    ],
)
def test_values_of_parquet_that_are_refused(
    values: list[Any], message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": values, "label": [0, 1] * 10}), tmp_path / "mine.parquet")
    assert message in refused(tmp_path / "mine.parquet", target="label")


def test_folders_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    datasets.disable_progress_bars()
    images = [Image.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(20)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["no", "yes", "never"]),
            "user": datasets.Value("string"),
        }
    )
    columns = {"image": images, "label": [0, 1] * 10, "user": list("abcd") * 5}
    data = datasets.Dataset.from_dict(columns, features=features)
    parts = datasets.DatasetDict({"train": data, "test": data.select(range(4))})
    parts.save_to_disk(tmp_path / "parts")
    reading = read(tmp_path / "parts", target="label", client="user")
    assert reading.format == "huggingface" and not reading.held_out
    assert reading.dataset.shape == ImageShape(3, 4, 5)
    assert reading.dataset.class_names == ("no", "yes", "never")
    assert reading.client_names == ("a", "b", "c", "d")
    assert reading.dataset.train.inputs[7].tolist() == np.full((4, 5, 3), 7).tolist()
    # The library's own objects are map-style data sets.
    direct = from_datasets(data, clients="user", classes=["no", "yes", "never"])
    assert direct.shape == ImageShape(3, 4, 5) and len(direct.test) == 4
    data.save_to_disk(tmp_path / "one", num_shards=3)
    one = read(tmp_path / "one", target="label", drop=("user",))
    assert one.held_out and len(one.dataset.test) == 4
    state = tmp_path / "one" / "state.json"
    state.write_text(state.read_text().replace("data-00000-of", "../../../data-00000-of"))
    assert "is not the name of a file" in refused(tmp_path / "one")
