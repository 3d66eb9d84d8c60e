"""The reader of LEAF's Shakespeare, on small files in all three forms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from motley.config import parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, load_dataset
from motley.data.datasets.shakespeare import CHARACTERS, VOCABULARY, encode
from motley.federation import Federation
from motley.models.inputs import TokenShape
from tests.data.natural_files import leaf_file, leaf_samples, texts, write_leaf, write_texts


def decode(codes: np.ndarray) -> str:
    return "".join("?" if code == 0 else CHARACTERS[code - 1] for code in codes)


def assert_same(one: Dataset, other: Dataset) -> None:
    for first, second in ((one.train, other.train), (one.test, other.test)):
        assert np.array_equal(first.inputs, second.inputs)
        assert np.array_equal(first.targets, second.targets)
        assert np.array_equal(first.clients, second.clients)


def test_all_forms_give_the_same_examples(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    write_leaf(tmp_path / "whole", divided=False)
    write_leaf(tmp_path / "divided", divided=True)
    data = load_dataset("shakespeare", root=tmp_path / "texts")
    assert (data.shape, data.classes, data.task) == (TokenShape(80, 80), 80, "next-token")
    assert_same(data, load_dataset("shakespeare", root=tmp_path / "whole"))
    assert_same(data, load_dataset("shakespeare", root=tmp_path / "divided"))


def test_examples_are_windows_of_a_role_and_the_next_character(tmp_path: Path) -> None:
    roles = write_texts(tmp_path)
    data = load_dataset("shakespeare", root=tmp_path)
    # Roles are numbered by name; the ghost is too short to have a test part.
    hamlet = roles["HAMLET_HAMLET"]
    examples = data.train
    assert examples.clients is not None
    rows = np.flatnonzero(examples.clients == 0)
    for at, row in enumerate(rows):
        assert decode(examples.inputs[row]) == hamlet[at : at + 80]
        assert decode(examples.targets[row : row + 1]) == hamlet[at + 80]
    assert np.unique(examples.clients).tolist() == [0, 1, 2]


def test_no_character_is_read_in_training_and_predicted_in_the_test(tmp_path: Path) -> None:
    roles = write_texts(tmp_path)
    data = load_dataset("shakespeare", root=tmp_path)
    count = len(roles["HAMLET_HAMLET"]) - 80
    train = int((data.train.clients == 0).sum())
    test = int((data.test.clients == 0).sum())
    assert (train, test) == (int(0.8 * count), count - int(0.8 * count) - 79)


def test_a_target_at_every_position_is_the_character_after_it(tmp_path: Path) -> None:
    roles = write_texts(tmp_path)
    last_only = load_dataset("shakespeare", root=tmp_path)
    every = load_dataset("shakespeare-every", root=tmp_path)
    hamlet = roles["HAMLET_HAMLET"]
    assert every.train.targets.shape == (len(every.train), 80)
    assert decode(every.train.inputs[3]) == hamlet[3:83]
    assert decode(every.train.targets[3]) == hamlet[4:84]
    # The test part is the same, so accuracies of both data sets can be compared.
    assert np.array_equal(every.test.inputs, last_only.test.inputs)
    assert np.array_equal(every.test.targets, last_only.test.targets)


def test_models_with_outputs_at_every_position_learn_from_all_of_them(tmp_path: Path) -> None:
    write_texts(tmp_path)
    overrides = [
        f"data.root={tmp_path}",
        "data.name=shakespeare-every",
        "data.max_per_client=20",
        "model.sizes=['lstm1','lstm2']",
        "model.lstm.hidden=8",
        "model.lstm.output=every",
        "federation.clients=3",
        "federation.clients_per_round=2",
        "training.rounds=2",
        "training.epochs=1",
        "evaluation.every=1",
        "evaluation.per_client=all",
    ]
    federation = Federation(resolve("shakespeare-lstm", [parse_overrides(overrides)]))
    _, record = federation.run_round(federation.initial_state())
    assert record.scores["lstm2"].accuracy is not None
    assert not record.refused
    overrides[5] = "model.lstm.output=last"
    with pytest.raises(MotleyError, match="80 rows of 80 logits per sequence"):
        Federation(resolve("shakespeare-lstm", [parse_overrides(overrides)]))


def test_a_limit_takes_windows_at_equal_distances(tmp_path: Path) -> None:
    write_texts(tmp_path)
    whole = load_dataset("shakespeare", root=tmp_path)
    limited = load_dataset("shakespeare", root=tmp_path, max_per_client=10)
    assert np.bincount(limited.train.clients).tolist() == [10, 10, 10]
    assert np.bincount(limited.test.clients).tolist() == [10, 10, 10]
    of_hamlet = whole.train.inputs[whole.train.clients == 0]
    chosen = np.arange(10) * len(of_hamlet) // 10
    assert np.array_equal(limited.train.inputs[:10], of_hamlet[chosen])


def test_characters_have_leafs_numbers_and_others_are_unknown() -> None:
    assert VOCABULARY == 80
    assert encode(" !}").tolist() == [1, 2, 79]
    assert encode("\n~é\U0001f600\ud800").tolist() == [0, 0, 0, 0, 0]
    assert encode(CHARACTERS).tolist() == list(range(1, 80))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must be a table with one entry per role"),
        ('{"A": {"play": "B"}}', "role 'A' has no 'text'"),
        ('{"A": {"text": 3}}', "role 'A' has no 'text'"),
        ('{"A": {"text": "abc"}}', "no role is long enough"),
        ('{"A": {"text": "abc', "truncated or damaged"),
        ("[" * 100_000, "truncated or damaged"),
    ],
)
def test_wrong_texts_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "shakespeare.json").write_text(content)
    with pytest.raises(MotleyError, match=message):
        load_dataset("shakespeare", root=tmp_path)


GOOD = leaf_samples(texts()["HAMLET_HAMLET"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "no table 'user_data'"),
        (json.dumps({"users": ["B"], "user_data": {"A": GOOD}}), "name different roles"),
        (json.dumps({"users": [1], "user_data": {"A": GOOD}}), "'users' must be a list of names"),
        (leaf_file({"A": {"x": [], "y": []}}), "there are no roles"),
        (json.dumps({"user_data": {"A": {"x": []}}}), "has no 'x' and 'y'"),
        (json.dumps({"user_data": {"A": {**GOOD, "y": GOOD["y"][1:]}}}), "620 texts, but 619"),
        (json.dumps({"user_data": {"A": {**GOOD, "y": [1] * 620}}}), "'y': entry 0 must be"),
        (json.dumps({"user_data": {"A": {**GOOD, "x": ["abc"]}}}), "a string of length 80"),
        (json.dumps({"user_data": {"A": {**GOOD, "x": "abc"}}}), "must be a list of strings"),
    ],
)
def test_wrong_files_of_leaf_are_named(tmp_path: Path, content: str, message: str) -> None:
    folder = tmp_path / "shakespeare" / "all_data"
    folder.mkdir(parents=True)
    (folder / "all_data.json").write_text(content)
    with pytest.raises(MotleyError, match=message):
        load_dataset("shakespeare", root=tmp_path)


def test_a_role_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare" / "all_data"
    folder.mkdir(parents=True)
    for name in ("a.json", "b.json"):
        (folder / name).write_text(leaf_file({"A": GOOD}))
    with pytest.raises(MotleyError, match=r"b.json: the role 'A' occurs twice"):
        load_dataset("shakespeare", root=tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shakespeare" / "all_data").mkdir(parents=True)
    with pytest.raises(MotleyError, match=r"there are no .json files"):
        load_dataset("shakespeare", root=tmp_path)
