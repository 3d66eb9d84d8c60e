"""Slots: the lengths of batches that kernels are compiled for before the first step."""

from __future__ import annotations

import pytest

from motley.client.training import TrainingSettings
from motley.engine.slots import lengths_to_compile


@pytest.mark.parametrize(
    ("batch_size", "lengths"),
    [(64, [64, 63, 32, 17, 16, 5]), (4, [4, 3, 2]), (2, [2]), (1, [1])],
)
def test_kernels_are_compiled_for_full_and_for_short_batches(
    batch_size: int, lengths: list[int]
) -> None:
    assert lengths_to_compile(TrainingSettings(batch_size=batch_size)) == lengths


def test_runs_without_short_batches_compile_for_full_ones_only() -> None:
    training = TrainingSettings(batch_size=64, drop_last=True)
    assert lengths_to_compile(training) == [64]
