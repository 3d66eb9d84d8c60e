"""Natural clients in training and test: fewer of them, and their partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.config import parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, Examples, load_dataset
from motley.data.fetch import fetch
from motley.data.natural import equally_spaced, limit_clients
from motley.data.partition import Natural
from motley.data.public import NoiseSettings, PublicDatasetSettings, public_images
from motley.models.inputs import TableShape
from tests.data.natural_files import write_har_arrays, write_texts


def dataset(train: list[int], test: list[int]) -> Dataset:
    """Return a data set whose inputs are the numbers of its rows."""

    def part(clients: list[int]) -> Examples:
        rows = np.arange(len(clients), dtype=np.float32)[:, np.newaxis]
        owners = np.array(clients, dtype=np.int64)
        return Examples(rows, np.zeros(len(clients), np.int64), owners, TableShape(1))

    return Dataset("rows", part(train), part(test), classes=2)


def rows_of(examples: Examples) -> list[int]:
    return examples.inputs[:, 0].astype(int).tolist()


def test_examples_of_a_client_are_taken_at_equal_distances() -> None:
    data = limit_clients(dataset([0, 1, 0, 0, 0, 1, 0], [0, 1, 1, 1]), 0, 2)
    # Client 0 has the rows 0, 2, 3, 4 and 6, client 1 the rows 1 and 5.
    assert rows_of(data.train) == [0, 1, 3, 5]
    assert rows_of(data.test) == [0, 1, 2]


@pytest.mark.parametrize(("max_clients", "max_per_client"), [(0, 3), (7, 0), (7, 3), (40, 2)])
def test_limits_of_many_clients_are_those_of_each_client(
    max_clients: int, max_per_client: int
) -> None:
    owners = np.random.default_rng(0).zipf(1.5, 300) % 40
    data = dataset(owners.tolist(), owners.tolist())
    names = np.unique(owners)
    kept = set(names[equally_spaced(len(names), max_clients)].tolist())
    rows: list[int] = []
    for name in kept:
        own = np.flatnonzero(owners == name)
        rows += own[equally_spaced(len(own), max_per_client)].tolist()
    limited = limit_clients(data, max_clients, max_per_client)
    assert rows_of(limited.train) == rows_of(limited.test) == sorted(rows)


def test_the_same_clients_are_left_in_both_parts() -> None:
    data = limit_clients(dataset([0, 1, 2, 3], [3, 2, 1, 0, 9]), 2, 0)
    assert data.train.clients is not None and data.test.clients is not None
    assert data.train.clients.tolist() == [0, 2]
    # Client 9 does not train, so it is not limited.
    assert data.test.clients.tolist() == [2, 0, 9]


def test_no_limit_changes_nothing() -> None:
    data = dataset([0, 1], [1])
    assert limit_clients(data, 0, 0) is data
    assert rows_of(limit_clients(data, 5, 5).train) == [0, 1]


def test_limits_that_leave_nothing_to_test_are_refused() -> None:
    with pytest.raises(MotleyError, match=r"data.max_clients = 1: none of these clients has test"):
        limit_clients(dataset([0, 1], [1]), 1, 0)


def test_data_without_clients_cannot_be_limited() -> None:
    with pytest.raises(MotleyError, match=r"data.max_per_client = 3: data set 'digits' does not"):
        limit_clients(load_dataset("digits"), 0, 3)


def test_settings_limit_a_data_set(tmp_path: Path) -> None:
    write_texts(tmp_path)
    overrides = ["data.name=shakespeare", f"data.root={tmp_path}", "data.max_per_client=7"]
    config = resolve("quickstart", [parse_overrides([*overrides, "data.max_clients=1"])])
    data = config.data.load()
    assert (len(data.train), len(data.test)) == (7, 7)


def test_people_are_clients_of_the_natural_partition(tmp_path: Path) -> None:
    write_har_arrays(tmp_path)
    train = load_dataset("har", root=tmp_path).train
    assert train.clients is not None
    partition = Natural().split_by_clients(train.targets, train.clients, 3, seed=0)
    for client in range(3):
        assert (train.clients[partition.of(client)] == client).all()
    assert partition.sizes.sum() == len(train)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("har", "archive.ics.uci.edu/dataset/240"), ("shakespeare", "preprocess.sh")],
)
def test_fetch_says_how_to_get_files_that_cannot_be_downloaded(
    tmp_path: Path, name: str, advice: str
) -> None:
    with pytest.raises(MotleyError, match=f"cannot be downloaded(.|\n)*{advice}"):
        fetch(name, tmp_path)


def test_fetch_finds_files_that_are_there(tmp_path: Path) -> None:
    write_har_arrays(tmp_path / "uci-har")
    assert fetch("har", tmp_path) == tmp_path / "uci-har"


def test_public_images_must_be_images(tmp_path: Path) -> None:
    write_har_arrays(tmp_path)
    images, signals = load_dataset("digits").train, load_dataset("har", root=tmp_path).train
    nothing = np.zeros(0, dtype=np.int64)
    har = PublicDatasetSettings(name="har")
    with pytest.raises(MotleyError, match=r"public.name = 'har': public examples must be images"):
        public_images(har, images, nothing, 0, tmp_path)
    with pytest.raises(MotleyError, match="the clients' examples are no images"):
        public_images(NoiseSettings(), signals, nothing, 0, tmp_path)
