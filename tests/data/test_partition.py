"""Partitions: properties of all of them, promises of each, and the skew they produce."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.data.partition import (
    PARTITIONS,
    Dirichlet,
    DirichletEqual,
    FromFile,
    Iid,
    Partition,
    PartitionSettings,
    Quantity,
    Shards,
    _transfers,
)
from motley.settings import validate

DRAWN = [Iid(), Dirichlet(), DirichletEqual(), Shards(), Quantity()]
BALANCED = np.tile(np.arange(10), 2000)

alphas = st.floats(-3, 3).map(lambda power: 10.0**power)
any_labels = st.lists(st.integers(0, 12), min_size=1, max_size=300).map(np.array)
partitions = st.one_of(
    st.just(Iid()),
    st.builds(Dirichlet, alpha=alphas, min_size=st.integers(1, 40)),
    st.builds(DirichletEqual, alpha=alphas),
    st.builds(Shards, shards_per_client=st.integers(1, 4)),
    st.builds(Quantity, alpha=alphas, min_size=st.integers(1, 40)),
)


def assert_deals_all(partition: Partition, samples: int, clients: int) -> None:
    assert len(partition) == clients and partition.sizes.min() >= 1
    assert np.array_equal(np.sort(partition.indices), np.arange(samples))


def skew(partition: Partition, labels: np.ndarray) -> float:
    """Mean total-variation distance of the clients' label distributions to that of all samples."""
    counts = partition.label_counts(labels, int(labels.max()) + 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean() / 2)


# --- the container


def test_a_partition_gives_views_sizes_and_label_counts() -> None:
    partition = Partition.from_owners(np.array([2, 0, 2, 0, 0]), clients=4)
    assert [partition.of(client).tolist() for client in range(4)] == [[1, 3, 4], [], [0, 2], []]
    assert len(partition) == 4 and partition.sizes.tolist() == [3, 0, 2, 0]
    assert np.shares_memory(partition.of(0), partition.indices)
    counts = partition.label_counts(np.array([0, 1, 1, 1, 0]), classes=3)
    assert counts.tolist() == [[1, 2, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    with pytest.raises(IndexError):
        partition.of(4)
    with pytest.raises(IndexError):
        partition.of(-1)


@pytest.mark.parametrize("offsets", [[0], [1, 3], [0, 2], [0, 4, 3]])
def test_a_partition_refuses_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(MotleyError, match="offsets"):
        Partition(np.arange(3), np.array(offsets))


# --- properties of all partitions


def test_every_partition_is_registered_under_its_own_name() -> None:
    assert [entry.name for entry in PARTITIONS] == [
        "iid",
        "dirichlet",
        "dirichlet-equal",
        "shards",
        "quantity",
        "natural",
        "file",
    ]
    for entry in PARTITIONS:
        assert entry.item.model_fields["name"].default == entry.name


@settings(deadline=None, max_examples=300)
@given(partition=partitions, labels=any_labels, data=st.data(), seed=st.integers(0, 2**40))
def test_any_partition_ends_and_deals_every_sample_once(
    partition: PartitionSettings, labels: np.ndarray, data: st.DataObject, seed: int
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    if isinstance(partition, Shards) and clients * partition.shards_per_client > len(labels):
        with pytest.raises(MotleyError, match="shards"):
            partition.split(labels, clients, seed)
        return
    dealt = partition.split(labels, clients, seed)
    assert_deals_all(dealt, len(labels), clients)
    if isinstance(partition, Dirichlet | Quantity):
        assert dealt.sizes.min() >= min(partition.min_size, len(labels) // clients)
    if isinstance(partition, Iid | DirichletEqual):
        assert np.ptp(dealt.sizes) <= 1
    if isinstance(partition, Shards):
        assert np.ptp(dealt.sizes) <= partition.shards_per_client


@pytest.mark.parametrize("partition", DRAWN, ids=lambda partition: partition.name)
def test_the_seed_decides_and_nothing_else_does(partition: PartitionSettings) -> None:
    np.random.seed(1)
    first = partition.split(BALANCED, 50, seed=3)
    np.random.seed(2)
    state = np.random.get_state()[1].copy()
    again = partition.split(BALANCED, 50, seed=3)
    assert np.array_equal(np.random.get_state()[1], state)
    assert np.array_equal(first.indices, again.indices) and np.array_equal(
        first.offsets, again.offsets
    )
    assert not np.array_equal(first.indices, partition.split(BALANCED, 50, seed=4).indices)


@pytest.mark.parametrize("partition", DRAWN, ids=lambda partition: partition.name)
def test_more_clients_than_samples_is_an_error(partition: PartitionSettings) -> None:
    for clients in (0, -1, 8):
        with pytest.raises(
            MotleyError,
            match=rf"federation\.clients = {clients}: should be 1 to 7, the number of training",
        ):
            partition.split(np.zeros(7, dtype=np.int64), clients, seed=0)
    targets_per_position = np.zeros((7, 3), dtype=np.int64)
    if partition.by_label:
        with pytest.raises(MotleyError, match="shape"):
            partition.split(targets_per_position, 2, seed=0)
    else:
        assert partition.split(targets_per_position, 2, seed=0).sizes.sum() == 7


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("cls", [Dirichlet, DirichletEqual, Quantity])
def test_alpha_must_be_a_positive_number(cls: type[PartitionSettings], alpha: float) -> None:
    with pytest.raises(MotleyError, match="alpha"):
        validate(cls, {"alpha": alpha})


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-9, 1e-3, 1e3, 1e300, 1.7e308])
@pytest.mark.parametrize("cls", [Dirichlet, DirichletEqual, Quantity])
@pytest.mark.parametrize("clients", [1, 10, 3000, 20_000])
def test_extreme_alphas_and_many_clients_end(cls: Any, alpha: float, clients: int) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert_deals_all(cls(alpha=alpha).split(BALANCED, clients, seed=0), len(BALANCED), clients)


@pytest.mark.parametrize(
    "partition", [*DRAWN, Dirichlet(alpha=0.01)], ids=lambda partition: partition.name
)
def test_a_hundred_thousand_clients_are_ordinary(partition: PartitionSettings) -> None:
    labels = np.tile(np.arange(10), 100_000)
    start = time.process_time()
    assert_deals_all(partition.split(labels, 100_000, seed=0), len(labels), 100_000)
    assert time.process_time() - start < 10


# --- promises of each


def test_iid_clients_have_nearly_the_global_labels() -> None:
    assert skew(Iid().split(BALANCED, 20, seed=0), BALANCED) < 0.06


@pytest.mark.parametrize("cls", [Dirichlet, DirichletEqual])
def test_a_small_alpha_skews_labels_and_a_large_one_does_not(cls: Any) -> None:
    by_alpha = [
        skew(cls(alpha=alpha).split(BALANCED, 20, seed=0), BALANCED) for alpha in (0.1, 1, 1000)
    ]
    iid = skew(Iid().split(BALANCED, 20, seed=0), BALANCED)
    assert by_alpha[0] > 0.55 and by_alpha[0] > 8 * iid
    assert by_alpha[0] > 1.4 * by_alpha[1] > 4 * by_alpha[2]


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    """With one class and no cap, shares ~ Dir(alpha).

    Their mean is 1/K and their variance (K - 1) / (K^2 (K alpha + 1)).
    """
    one_class = np.zeros(20_000, dtype=np.int64)
    for alpha in (0.3, 2.0):
        tries = [
            Dirichlet(alpha=alpha, min_size=1).split(one_class, 5, seed).sizes / 20_000
            for seed in range(500)
        ]
        assert np.allclose(np.mean(tries, axis=0), 1 / 5, atol=0.04)
        assert np.var(tries) == pytest.approx(4 / (25 * (5 * alpha + 1)), rel=0.15)


@pytest.mark.parametrize(("alpha", "clients", "seed"), [(0.1, 10, 0), (0.5, 20, 1), (0.1, 20, 3)])
def test_dirichlet_of_a_numpy_seed_is_the_benchmarks(alpha: float, clients: int, seed: int) -> None:
    """Compare with the benchmark's loop, written with lists and NumPy's global state."""
    labels = np.arange(3000) % 10
    state = np.random.get_state()
    np.random.seed(seed)
    tries = 0
    while True:
        tries += 1
        held: list[list[int]] = [[] for _ in range(clients)]
        for k in range(10):
            members = np.where(labels == k)[0]
            np.random.shuffle(members)
            shares = np.random.dirichlet(np.repeat(alpha, clients))
            shares = np.array(
                [s * (len(own) < 3000 / clients) for s, own in zip(shares, held, strict=True)]
            )
            ends = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
            for own, more in zip(held, np.split(members, ends), strict=True):
                own.extend(more.tolist())
        if min(map(len, held)) >= 10:
            break
    np.random.set_state(state)
    assert tries > 1 or (alpha, clients) != (0.1, 20)  # the last case must start over
    ours = Dirichlet(alpha=alpha, numpy_seed=seed).split(labels, clients, seed=3)
    assert [sorted(own) for own in held] == [ours.of(client).tolist() for client in range(clients)]


def test_a_benchmark_partition_that_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(
        MotleyError,
        match=r"numpy_seed = 0: in each of 50 tries, .* 250 clients had fewer than 10",
    ):
        Dirichlet(alpha=0.001, numpy_seed=0).split(np.arange(3000) % 10, 250, seed=0)


def test_dirichlet_gives_nothing_more_to_clients_that_hold_their_share() -> None:
    """A client with N / clients samples gets nothing of later classes.

    So no client has more than N / clients plus one class.
    """
    counts = Dirichlet(alpha=0.3).split(BALANCED, 20, seed=1).label_counts(BALANCED, 10)
    before = np.cumsum(counts, axis=1) - counts
    assert not counts[before >= len(BALANCED) / 20].any()


def test_dirichlet_repairs_what_repeating_cannot_and_keeps_the_skew() -> None:
    partition = Dirichlet(alpha=0.001, min_size=30).split(BALANCED, 200, seed=0)
    assert partition.sizes.min() == 30
    assert (partition.label_counts(BALANCED, 10) > 0).sum(axis=1).mean() < 2
    lowered = Dirichlet(alpha=0.5, min_size=1000).split(BALANCED, 200, seed=0)
    assert lowered.sizes.tolist() == [100] * 200


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).map(np.array), data=st.data())
def test_transfers_equal_taking_one_by_one_from_the_largest(
    sizes: np.ndarray, data: st.DataObject
) -> None:
    minimum = data.draw(st.integers(0, int(sizes.sum()) // len(sizes)))
    given_away, taken = _transfers(sizes, minimum)
    expected = sizes.copy()
    for needy in np.flatnonzero(sizes < minimum):
        while expected[needy] < minimum:
            expected[np.argmax(expected)] -= 1
            expected[needy] += 1
    assert sorted(sizes - given_away + taken) == sorted(expected)
    assert given_away.min() >= 0 and not (given_away * taken).any()


def test_dirichlet_equal_favours_no_client_by_its_number() -> None:
    """When classes run out, some clients go without; these must not be those with high numbers."""
    halves = []
    for seed in range(20):
        counts = (
            DirichletEqual(alpha=0.05)
            .split(BALANCED[:2000], 100, seed)
            .label_counts(BALANCED[:2000], 10)
        )
        top = counts.max(axis=1) / counts.sum(axis=1)
        halves.append((top[:50].mean(), top[50:].mean()))
    first, second = np.mean(halves, axis=0)
    assert first == pytest.approx(second, abs=0.03)


def test_shards_give_few_classes_to_each_client() -> None:
    classes = (Shards().split(BALANCED, 100, seed=0).label_counts(BALANCED, 10) > 0).sum(axis=1)
    assert classes.max() <= 2 and classes.mean() > 1.5
    one = Shards(shards_per_client=1).split(BALANCED, 10, seed=0).label_counts(BALANCED, 10)
    assert (
        np.array_equal(np.sort(one.argmax(axis=1)), np.arange(10)) and one.max(axis=1).min() == 2000
    )


def test_quantity_skews_sizes_but_not_labels() -> None:
    partition = Quantity(alpha=0.5, min_size=50).split(BALANCED, 20, seed=0)
    assert partition.sizes.min() >= 50 and partition.sizes.max() > 5 * np.median(partition.sizes)
    assert skew(partition, BALANCED) < 0.12


def test_real_fashion_mnist_is_skewed_by_a_true_dirichlet(shared_data: Path) -> None:
    labels = load_dataset("fashion-mnist", root=shared_data).train.targets
    partition = Dirichlet(alpha=0.5).split(labels, 100, seed=0)
    assert_deals_all(partition, 60_000, 100)
    assert partition.sizes.min() >= 10
    assert skew(partition, labels) > 0.4 > 5 * skew(Iid().split(labels, 100, seed=0), labels)


# --- from a file


def split_file(
    path: Path, content: Any, clients: int = 2, samples: int = 10, **keys: Any
) -> list[list[int]]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    partition = FromFile(path=path, **keys).split(
        np.zeros(samples, dtype=np.int64), clients, seed=0
    )
    return [partition.of(client).tolist() for client in range(clients)]


def test_files_of_all_forms_give_the_same_partition(tmp_path: Path) -> None:
    wanted = [[4, 2, 9], [0]]
    assert split_file(tmp_path / "lists.json", wanted) == wanted
    assert split_file(tmp_path / "object.json", {"1": [0], "0": [4, 2, 9]}) == wanted
    np.savez(
        tmp_path / "arrays.npz", **{"1": np.array([0]), "0": np.array([4, 2, 9], dtype=np.int32)}
    )
    partition = FromFile(path=tmp_path / "arrays.npz").split(np.zeros(10), 2, seed=0)
    assert [partition.of(client).tolist() for client in range(2)] == wanted
    np.savez(tmp_path / "unnamed.npz", np.array([4, 2, 9]), np.array([0]))
    partition = FromFile(path=tmp_path / "unnamed.npz").split(np.zeros(10), 2, seed=0)
    assert [partition.of(client).tolist() for client in range(2)] == wanted


def test_object_keys_are_ordered_as_numbers(tmp_path: Path) -> None:
    content = {str(client): [client] for client in reversed(range(12))}
    assert split_file(tmp_path / "many.json", content, clients=12, samples=12) == [
        [client] for client in range(12)
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[1], [2], [3]], "holds 3 clients, but federation.clients = 2"),
        ([[1], [2, 10]], r"client 1 holds sample 10, but samples are numbered 0\.\.9"),
        ([[-1], [2]], "client 0 holds sample -1"),
        ([[1], [2, 3, 2]], "client 1 holds sample 2 twice"),
        ([[1, 2], [3, 2]], "clients 0 and 1 both hold sample 2.*allow_shared"),
        ([[1], []], "client 1 must be a flat list of at least one"),
        ([[1], [2.5]], "client 1 must be a flat list"),
        ([[1], [[2], [3, 4]]], "client 1 must be a flat list"),
        ([[1], ["2"]], "client 1 must be a flat list"),
        ({"0": [1], "2": [2]}, r"0\.\.1; it has no '1'"),
        ([], "must hold a list of index lists"),
        ("7", "must hold a list of index lists"),
        ("[[1], [2]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_wrong_file_is_explained(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=message):
        split_file(tmp_path / "lists.json", content)


def test_samples_may_be_shared_where_that_is_meant(tmp_path: Path) -> None:
    assert split_file(tmp_path / "lists.json", [[1, 2], [3, 2]], allow_shared=True) == [
        [1, 2],
        [3, 2],
    ]
    with pytest.raises(MotleyError, match="twice"):
        split_file(tmp_path / "lists.json", [[1, 1], [3, 2]], allow_shared=True)


def test_files_that_are_absent_or_pickled_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", **{"0": np.array([[1], [2, 3]], dtype=object)})
    (tmp_path / "lists.npy").write_bytes(b"")
    for name, message in {
        "objects.npz": "cannot be read",
        "absent.json": "no partition file",
        "lists.npy": "end in",
    }.items():
        with pytest.raises(MotleyError, match=message):
            FromFile(path=tmp_path / name).split(np.zeros(5), 1, seed=0)


@pytest.mark.parametrize(
    ("owners", "clients", "message"),
    [
        ([0, 4], 4, r"owners\[1\] = 4: with clients = 4, owners are 0 to 3\."),
        ([0, -1], 4, r"owners\[1\] = -1: with clients = 4"),
        ([0.0, 1.0], 2, "one client number per sample, not float64"),
        (["a"], 1, "one client number per sample, not <U1"),
        ([[0], [1]], 2, r"one client number per sample, not int64 of shape \(2, 1\)"),
        ([0, 1], "2", "clients = '2': should be a whole number, 1 or more"),
    ],
)
def test_owners_are_client_numbers(owners: Any, clients: Any, message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        Partition.from_owners(owners, clients)


def test_owners_may_be_a_list() -> None:
    owners: Any = [1, 0, 1]
    assert Partition.from_owners(owners, 3).sizes.tolist() == [1, 2, 0]
