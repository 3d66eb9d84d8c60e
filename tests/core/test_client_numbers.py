"""`ClientNumbers` is a dict of whole numbers by client that takes little memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from motley.core.client_numbers import ClientNumbers, client_numbers


def test_it_equals_the_dict_of_the_same_updates_and_counts() -> None:
    rng = np.random.default_rng(0)
    rounds: dict[int, int] = {}
    uploads: Counter[int] = Counter()
    numbers, counts = ClientNumbers(), ClientNumbers()
    for round_number in range(1, 40):
        clients = rng.choice(60, 7).tolist()  # a client may occur twice
        rounds |= dict.fromkeys(clients, round_number)
        uploads.update(clients)
        numbers = numbers.updated(dict.fromkeys(clients, round_number))
        counts = counts.counted(clients)
        assert numbers == rounds and rounds == numbers
        assert counts == dict(uploads)
    assert list(numbers) == sorted(rounds) and len(numbers) == len(rounds)
    assert list(numbers.items()) == sorted(rounds.items())
    assert counts.largest() == max(uploads.values())
    for client in range(-1, 61):
        assert (client in numbers) == (client in rounds)
        assert numbers.get(client) == rounds.get(client)
    with pytest.raises(KeyError, match="60"):
        numbers[60]


def test_an_update_leaves_the_mapping_before_it_as_it_was() -> None:
    before = ClientNumbers({3: 1, 5: 2})
    after = before.updated({5: 7, 4: 7})
    assert before == {3: 1, 5: 2} and after == {3: 1, 4: 7, 5: 7}
    assert before != after and before != {3: 1}
    assert client_numbers(before) is before and client_numbers({3: 1, 5: 2}) == before


def test_changes_are_new_clients_and_other_numbers() -> None:
    before = ClientNumbers({3: 1, 5: 2, 9: 1})
    assert ClientNumbers({3: 1, 4: 1, 5: 3, 10: 1}).changed_since(before) == {4: 1, 5: 3, 10: 1}
    assert before.changed_since(before) == {}
    assert before.changed_since(ClientNumbers()) == before


def test_an_empty_one_has_no_clients() -> None:
    empty = ClientNumbers()
    assert not empty and empty == {} and empty.largest() == 0 and empty.get(0) is None
    assert empty.updated({}) == {}


@pytest.mark.parametrize(
    ("clients", "numbers"),
    [
        (np.array([1, 1], np.int32), np.array([1, 2], np.int32)),
        (np.array([2, 1], np.int32), np.array([1, 2], np.int32)),
        (np.array([1, 2], np.int32), np.array([1], np.int32)),
        (np.array([1, 2], np.int64), np.array([1, 2], np.int32)),
        (np.array([[1]], np.int32), np.array([[1]], np.int32)),
    ],
)
def test_arrays_of_a_damaged_file_are_rejected(clients: np.ndarray, numbers: np.ndarray) -> None:
    with pytest.raises(ValueError, match="clients"):
        ClientNumbers.from_arrays(clients, numbers)
