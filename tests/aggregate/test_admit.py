"""Uploads that do not fit are refused with a reason."""

from __future__ import annotations

import re

import pytest
import torch

from motley.aggregate.admit import blemish, misfit

SENT = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": torch.zeros(2, 3)}, "'n' is missing"),
        ({"w": torch.zeros(3, 2), "n": torch.tensor(0)}, r"\(3, 2\); \(2, 3\) was sent out"),
        ({"w": torch.zeros(2, 3), "n": torch.tensor(0), "v": torch.zeros(1)}, "unknown name 'v'"),
        ({"w": torch.zeros(2, 3).double(), "n": torch.tensor(0)}, "float64"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], words: str) -> None:
    reason = misfit(SENT, change)
    assert reason is not None
    assert re.search(words, reason)


def test_what_fits_is_taken() -> None:
    assert misfit(SENT, {"n": torch.tensor(3), "w": torch.ones(2, 3)}) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found(bad: float) -> None:
    poisoned = {"a": torch.ones(3), "b": torch.tensor([[1.0, bad], [0.0, 2.0]])}
    changes: list[dict[str, torch.Tensor]] = [{"a": torch.ones(3)}, poisoned, {"n": torch.tensor(1)}]
    assert [float(blemish(change)) for change in changes] == [0, 1, 0]
