"""Test examples of every client: held out of its training examples, or its own in the test set."""

from __future__ import annotations

import numpy as np
import pytest

from motley.core.errors import MotleyError
from motley.data.client_tests import (
    all_of_one,
    held_out_positions,
    hold_out,
    natural_tests,
)
from motley.data.partition import Partition
from tests.partitions import joined


def lists(partition: Partition) -> list[list[int]]:
    return [partition.of(client).tolist() for client in range(len(partition))]


@pytest.mark.parametrize(
    ("samples", "fraction", "expected"),
    [
        (1, 0.5, 0),
        (2, 0.01, 1),
        (2, 0.99, 1),
        (10, 0.2, 2),
        (10, 0.25, 2),
        (10, 0.99, 9),
        (0, 0.2, 0),
    ],
)
def test_a_client_holds_out_at_least_one_example_and_trains_on_at_least_one(
    samples: int, fraction: float, expected: int
) -> None:
    chosen = held_out_positions(np.zeros(samples, dtype=np.int64), fraction, seed=0, client=3)
    assert len(set(chosen.tolist())) == len(chosen) == expected
    assert all(0 <= place < samples for place in chosen)


@pytest.mark.parametrize("client", range(20))
def test_each_class_has_its_share_of_the_held_out_examples(client: int) -> None:
    """17, 9, 3 and 1 examples of four classes; a fifth of them is 3.4, 1.8, 0.6 and 0.2."""
    targets = np.random.default_rng(client).permutation(np.repeat([0, 1, 2, 3], [17, 9, 3, 1]))
    chosen = held_out_positions(targets, 0.2, seed=1, client=client)
    counts = np.bincount(targets[chosen], minlength=4)
    assert counts.sum() == 6
    assert (np.abs(counts - np.array([3.4, 1.8, 0.6, 0.2])) < 1).all()


def test_sequences_of_targets_are_held_out_too() -> None:
    chosen = held_out_positions(np.zeros((10, 4), dtype=np.int64), 0.3, seed=1, client=0)
    assert len(set(chosen.tolist())) == 3


def test_held_out_examples_and_the_others_make_up_the_partition() -> None:
    targets = np.random.default_rng(0).integers(0, 4, 40)
    partition = Partition.from_owners(np.random.default_rng(1).integers(0, 5, 40), 6)
    trained, tested = hold_out(partition, targets, 0.3, seed=7)
    for client in range(6):
        both = np.concatenate([trained.of(client), tested.of(client)])
        assert sorted(both) == sorted(partition.of(client))
    assert lists(hold_out(partition, targets, 0.3, seed=7)[1]) == lists(tested)
    assert lists(hold_out(partition, targets, 0.3, seed=8)[1]) != lists(tested)


def test_a_node_holds_out_the_same_examples_alone() -> None:
    """The choice depends on the client's number and its own targets, not on other clients."""
    targets = np.random.default_rng(0).integers(0, 4, 40)
    partition = Partition.from_owners(np.random.default_rng(1).integers(0, 3, 40), 3)
    _, tested = hold_out(partition, targets, 0.3, seed=7)
    rows = partition.of(1)
    _, alone = hold_out(all_of_one(1, 3, len(rows)), targets[rows], 0.3, seed=7)
    assert rows[alone.of(1)].tolist() == tested.of(1).tolist()
    assert not len(alone.of(0)) and not len(alone.of(2))


def test_shared_examples_are_not_held_out() -> None:
    shared = joined([np.array([0, 1]), np.array([1, 2])])
    with pytest.raises(MotleyError, match="some clients share examples"):
        hold_out(shared, np.zeros(3, dtype=np.int64), 0.5, seed=0)


def test_natural_clients_are_tested_on_their_own_examples() -> None:
    """Client 0 of the federation is person 7, client 1 is person 4; person 5 does not take part."""
    train = np.array([4, 7, 7, 5, 4])
    partition = joined([np.array([1, 2]), np.array([0, 4])])
    test = np.array([7, 5, 4, 7, 9])
    assert lists(natural_tests(partition, train, test)) == [[0, 3], [2]]


def test_a_natural_client_without_test_examples_has_none() -> None:
    partition = joined([np.array([0]), np.array([1])])
    tests = natural_tests(partition, np.array([0, 1]), np.array([1, 1]))
    assert lists(tests) == [[], [0, 1]]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (None, [0], "does not record which client"),
        ([0, 1, 0, 1], None, "does not record which client"),
        ([0, 1, 0, 1], [0], "mixes or divides the natural clients"),
        ([0, 0, 0, 0], [0], "mixes or divides the natural clients"),
        ([0, 0, 1, 1], [2, 3], "do not occur in training"),
    ],
)
def test_data_without_natural_test_examples_is_refused(
    train: list[int] | None, test: list[int] | None, message: str
) -> None:
    partition = joined([np.array([0, 1]), np.array([2, 3])])
    given = [None if names is None else np.array(names) for names in (train, test)]
    with pytest.raises(MotleyError, match=message) as raised:
        natural_tests(partition, *given)
    assert "evaluation.client_test_fraction" in str(raised.value)
