"""Damaged and hostile input files of every command: one message with the file's name, status 1 or 2.

The working folder holds the files that `files` writes.
"""

from __future__ import annotations

import io
import json
import shlex
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Command, TinyRun

ARRAYS = {
    "x_train": np.zeros((6, 8, 8), np.uint8),
    "y_train": np.arange(6) % 2,
    "x_test": np.zeros((4, 8, 8), np.uint8),
    "y_test": np.arange(4) % 2,
}
LISTS = {"0": np.arange(3), "1": np.arange(3, 6)}
DEPTH = 100_000


def archive(arrays: dict[str, np.ndarray], method: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as zipped:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            zipped.writestr(f"{name}.npy", member.getvalue())
    return content.getvalue()


def encrypted(content: bytes) -> bytes:
    """Set the bit for encryption in all headers of a zip archive."""
    raw = bytearray(content)
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = raw.find(mark)
        while at >= 0:
            raw[at + place] |= 1
            at = raw.find(mark, at + 1)
    return bytes(raw)


def with_method(content: bytes, method: int) -> bytes:
    """Declare another method of compression in all headers of a zip archive."""
    raw = bytearray(content)
    for mark, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        at = raw.find(mark)
        while at >= 0:
            raw[at + place : at + place + 2] = struct.pack("<H", method)
            at = raw.find(mark, at + 1)
    return bytes(raw)


def zip64(arrays: dict[str, np.ndarray]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, array in arrays.items():
            with zipped.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.save(member, array)
    return content.getvalue()


def write_files(folder: Path) -> None:
    for start, arrays in (("", ARRAYS), ("lists-", LISTS)):
        stored = archive(arrays, zipfile.ZIP_STORED)
        contents = {
            "bzip2": archive(arrays, zipfile.ZIP_BZIP2),
            "lzma": archive(arrays, zipfile.ZIP_LZMA),
            "encrypted": encrypted(stored),
            "unknown": with_method(stored, 97),
            "cut": stored[: len(stored) // 2],
            "zip64": zip64(arrays),
            "deflated": archive(arrays, zipfile.ZIP_DEFLATED),
        }
        for name, content in contents.items():
            (folder / f"{start}{name}.npz").write_bytes(content)
    np.savez(folder / "stray.npz", **{**ARRAYS, "y_train": np.array([0, 1, 0, 1, 0, 2**31])})
    for name in ("folder.npz", "folder.json", "folder.csv", "folder.toml", "folder.jsonl"):
        (folder / name).mkdir()
    lists = "[" * DEPTH + "]" * DEPTH
    (folder / "deep.json").write_text(lists)
    (folder / "deep.jsonl").write_text('{"a": ' + lists + "}\n")
    (folder / "deep.toml").write_text(f"seed = {lists}\n")
    (folder / "dots.toml").write_text("a." * 1_000 + "a = 1\n")
    (folder / "tables.toml").write_text("[" + "a." * 1_000 + "a]\n")
    (folder / "digits.toml").write_text(f"seed = {'9' * 5000}\n")
    (folder / "digits.json").write_text(f"[[{'9' * 5000}]]")
    (folder / "nan.json").write_text("[[NaN], [1]]")
    (folder / "texts.json").write_text('[["a"], [1]]')
    (folder / "nested.json").write_text("[[[1]], [[2]]]")
    budgets = {
        "many": "client,memory_mb\n0,1,2\n",
        "few": "client,memory_mb,gflops\n0\n",
        "text": "client,memory_mb\n0,much\n",
        "negative": "client,memory_mb\n0,-5\n",
        "nan": "client,memory_mb\n0,nan\n",
        "infinite": "client,gflops\n0,inf\n",
        "huge": "client,parameters\n0,1e999\n",
        "noclient": "memory_mb\n5\n",
        "empty": "",
        "twice": "client,gflops\n0,1\n0,2\n",
        "binary": "client,gflops\n0,\0\n",
        "column": "client,[/]\n0,1\n",
        "long": f"client,gflops\n{'x' * 200_000},1\n",
    }
    for name, content in budgets.items():
        (folder / f"{name}.csv").write_text(content)


PARTITION = "run --set data.partition.name=file --set data.partition.path="
NPZ = "run --set data.name=npz --set data.path="
TWO = "--set federation.clients=2 --set federation.clients_per_round=1 --set model.sizes=mlp1"
OTHER = "which is not read. Save it with np.savez or np.savez_compressed."
DAMAGED = [
    # --- archives
    (f"{NPZ}bzip2.npz", f"bzip2.npz: x_train.npy is compressed with 'bzip2', {OTHER}"),
    (f"{NPZ}lzma.npz", f"lzma.npz: x_train.npy is compressed with 'lzma', {OTHER}"),
    (f"{NPZ}unknown.npz", f"unknown.npz: x_train.npy is compressed with '97', {OTHER}"),
    (f"{NPZ}encrypted.npz", "encrypted.npz: x_train.npy is encrypted, which is not read."),
    (f"{NPZ}cut.npz", "cut.npz is not a .npz file, or is truncated"),
    (f"{NPZ}folder.npz", "folder.npz is a folder"),
    (f"{NPZ}stray.npz", "y_train, row 5: the label 2147483648 is outside 0..9999999"),
    ("data check bzip2.npz", f"is compressed with 'bzip2', {OTHER}"),
    ("data check encrypted.npz", "is encrypted, which is not read."),
    ("data check stray.npz", "the label 2147483648 is outside"),
    ("data check folder.npz", "no images, no text files"),
    ("data check folder.csv --set format=csv", "folder.csv is a folder; a file is expected."),
    ("data check folder.jsonl --set format=jsonl", "folder.jsonl is a folder"),
    (f"{PARTITION}lists-bzip2.npz", f"is compressed with 'bzip2', {OTHER}"),
    (f"{PARTITION}lists-lzma.npz", f"is compressed with 'lzma', {OTHER}"),
    (f"{PARTITION}lists-encrypted.npz", "is encrypted, which is not read."),
    (f"{PARTITION}lists-cut.npz", "lists-cut.npz cannot be read: "),
    (f"{PARTITION}folder.npz", "folder.npz"),
    # --- JSON
    (f"{PARTITION}deep.json", "deep.json cannot be read: maximum recursion depth"),
    (f"{PARTITION}digits.json", "digits.json cannot be read: Exceeds the limit"),
    (f"{PARTITION}nan.json {TWO}", "must be a flat list of at least one whole number."),
    (f"{PARTITION}texts.json {TWO}", "must be a flat list of at least one whole number."),
    (f"{PARTITION}nested.json {TWO}", "must be a flat list of at least one whole number."),
    (f"{PARTITION}folder.json", "folder.json"),
    ("data check deep.jsonl", "deep.jsonl, line 1: is not a JSON record"),
    ("bench --compare deep.json --compare deep.json", "deep.json is not a file of timings"),
    # --- TOML
    ("run deep.toml", "deep.toml: lists or tables are nested too deeply."),
    ("run dots.toml", "dots.toml: is not valid TOML: lists or tables are nested more than 30"),
    ("run tables.toml", "tables.toml: is not valid TOML: lists or tables are nested more than 30"),
    ("run digits.toml", "digits.toml: is not valid TOML: Exceeds the limit"),
    ("run folder.toml", "folder.toml: cannot be read: "),
    ("config deep.toml", "deep.toml: lists or tables are nested too deeply."),
    ("plan dots.toml", "dots.toml: is not valid TOML"),
    ("study deep.toml", "deep.toml: lists or tables are nested too deeply."),
    ("study dots.toml", "dots.toml: is not valid TOML"),
    ("study folder.toml", "folder.toml: cannot be read: "),
    # --- values of --set
    (f"config --set seed={'[' * 5000}", "--set seed=[[["),
    (f"config --set seed={'[' * 50 + ']' * 50}", "lists or tables are nested more than 30 deep"),
    (f"config --set seed={'9' * 5000}", "cannot be read: Exceeds the limit (4300 digits)"),
    (f"config --set {'a.' * 3000}a=1", "has 3001 keys in one another; at most 30 are read."),
    (f"data check cut.npz --set {'a.' * 3000}a=1", "has 3003 keys in one another"),
    ("config --set seed=nan", "seed = nan"),
    # --- budgets
    ("plan --budgets many.csv", "many.csv, line 2: has more cells than there are columns."),
    ("plan --budgets text.csv", "memory_mb = 'much': should be a number above 0, or empty."),
    ("plan --budgets negative.csv", "memory_mb = '-5': should be a number above 0, or empty."),
    ("plan --budgets nan.csv", "memory_mb = 'nan': should be a number above 0, or empty."),
    ("plan --budgets infinite.csv", "gflops = 'inf': should be a number above 0, or empty."),
    ("plan --budgets huge.csv", "parameters = '1e999': should be a number above 0, or empty."),
    ("plan --budgets noclient.csv", "needs a column 'client'"),
    ("plan --budgets empty.csv", "needs a column 'client'"),
    ("plan --budgets twice.csv", "client '0' is listed twice, in lines 2 and 3."),
    ("plan --budgets binary.csv", "binary.csv"),
    ("plan --budgets column.csv", "unknown column '[/]'"),
    ("plan --budgets long.csv", "long.csv: cannot be read: field larger than field limit"),
    ("plan --budgets folder.csv", "folder.csv: cannot be read: "),
    ("plan --budgets none.csv", "none.csv: cannot be read: "),
    (
        "run --set federation.budgets=many.csv --set federation.size_assignment=budget",
        "has more cells than there are columns.",
    ),
    # --- inputs of predict
    ("predict R --size resnet10 bzip2.npz", f"is compressed with 'bzip2', {OTHER}"),
    ("predict R --size resnet10 encrypted.npz", "is encrypted, which is not read."),
    ("predict R --size resnet10 cut.npz", "cut.npz: cannot be read: "),
    ("predict R --size resnet10 folder.npz", "folder.npz: is a folder; give the names of files."),
    ("predict R --size resnet10 many.csv", "many.csv: has shape (1, 3)"),
]


@pytest.fixture(scope="module")
def folder(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged")
    write_files(path)
    (path / "R").symlink_to(tiny_run.path)
    return path


@pytest.mark.parametrize(
    ("invocation", "said"), DAMAGED, ids=[invocation[:50] for invocation, _ in DAMAGED]
)
def test_a_damaged_input_is_one_message(
    invocation: str, said: str, motley: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    answer = motley(*shlex.split(invocation))
    output = answer.out + answer.err
    assert answer.code in (1, 2) and "bug in Motley" not in output, output[-2000:]
    assert "Traceback" not in output
    assert said in output
    assert len(output) < 3000  # a message, not a dump of the value
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["zip64.npz", "deflated.npz"])
def test_ordinary_archives_are_read(
    name: str, motley: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    answer = motley("data", "check", name)
    assert answer.code == 0 and "6 for training, 4 for testing" in answer.out


def test_a_line_of_budgets_may_have_too_few_cells(
    motley: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing cell means no limit, as an empty one does."""
    monkeypatch.chdir(folder)
    answer = motley("plan", "--budgets", "few.csv")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("content", ["[" * DEPTH, json.dumps({"config": "[" * 10})])
def test_a_damaged_card_of_an_exported_model_is_named(
    content: str, motley: Command, tmp_path: Path
) -> None:
    (tmp_path / "card.json").write_text(content)
    answer = motley("predict", tmp_path, "x.npy")
    assert answer.code == 2 and "card.json cannot be read: " in answer.err


def test_a_recursion_in_motley_is_still_a_bug() -> None:
    from motley.cli.failures import explain

    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    assert explain(caught.value) is None
    with pytest.raises(RecursionError) as parsing:
        json.loads("[" * DEPTH)
    assert "nested too deeply" in (explain(parsing.value) or "")
