"""Keyed randomness: every argument matters, nothing else does, and nobody else's generator is touched."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from motley.core.randomness import generator, key, torch_seed


def test_keys_are_fixed_for_all_time() -> None:
    """A change here changes every partition, every batch and every initial state of every published run."""
    assert key(1, "clients", 7) == 8767194123958994210
    assert key(0, "digits", 3) == 4239728008981098355
    assert generator(1, "clients", 7).integers(0, 1000, 4).tolist() == [128, 44, 747, 261]


def test_the_same_arguments_give_the_same_key() -> None:
    assert key(1, "batches", 2, 3) == key(1, "batches", 2, 3)
    assert key(1, "batches", 2, 3) == key(np.int64(1), "batches", np.int64(2), 3)  # type: ignore[arg-type]


def test_every_argument_changes_the_key() -> None:
    calls: list[tuple[int, str, tuple[int | str, ...]]] = [
        (1, "batches", ()),
        (2, "batches", ()),
        (1, "clients", ()),
        (1, "batches", (0,)),
        (1, "batches", (1,)),
        (1, "batches", (1, 0)),
        (1, "batches", (0, 1)),
        (1, "batches", (0, 0)),
        (1, "batches", (10,)),
        (1, "batches", ("iid",)),
        (12, "batches", (3,)),
        (1, "batches", (23,)),
        (1, "batches2", (3,)),
    ]
    keys = [key(seed, purpose, *which) for seed, purpose, which in calls]
    assert len(set(keys)) == len(keys)


def test_arguments_do_not_run_into_each_other() -> None:
    texts = ["a/b", "a", "b", "/", "a/", "/b", "\\", "a\\", "\\/b", ""]
    calls = [(one,) for one in texts] + list(itertools.product(texts, repeat=2))
    keys = {key(1, *call) for call in calls}
    assert len(keys) == len(calls)


def test_a_key_is_63_bits_that_look_random() -> None:
    keys = [key(1, "step", number) for number in range(2000)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= value < 2**63 for value in keys)
    ones = np.array([[value >> bit & 1 for bit in range(63)] for value in keys]).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.06


def test_a_generator_depends_on_its_key_and_on_no_global_state() -> None:
    expected = generator(3, "batches", 1).random(5)
    for seed in (0, 1):
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        assert np.array_equal(generator(3, "batches", 1).random(5), expected)
    assert not np.array_equal(generator(3, "batches", 2).random(5), expected)
    assert not np.array_equal(generator(4, "batches", 1).random(5), expected)


def test_a_generator_leaves_global_state_alone() -> None:
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    generator(3, "batches", 1).random(5)
    assert np.array_equal(np.random.random(3), expected)


def test_generators_do_not_share_a_stream() -> None:
    expected = generator(3, "batches", 1).random(4)
    one, other = generator(3, "batches", 1), generator(3, "batches", 2)
    mixed = []
    for _ in range(4):
        mixed.append(one.random())
        other.random(3)
    assert np.array_equal(mixed, expected)


def test_torch_seed_keys_what_is_drawn_inside() -> None:
    drawn = []
    for state, which in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(state)
        with torch_seed(9, "initial state", which):
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("fails", [False, True])
def test_torch_seed_leaves_the_callers_generator_as_it_was(fails: bool) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    try:
        with torch_seed(9, "initial state"):
            torch.rand(100)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert torch.equal(torch.rand(4), expected)
