"""The moving average of the global state, by hand."""

from __future__ import annotations

import pytest
import torch

from motley.server.ema import moving_average


def test_early_rounds_are_a_plain_mean_and_later_ones_decay() -> None:
    averaged = None
    values = [8.0, 2.0, 5.0, 1.0]
    seen = []
    for number, value in enumerate(values, start=1):
        averaged = moving_average(
            averaged, {"w": torch.tensor([value]), "n": torch.tensor(number)}, 0.6, number
        )
        seen.append(averaged["w"].item())
    assert seen == pytest.approx(
        [8.0, 5.0, 0.6 * 5 + 0.4 * 5, 0.6 * 5 + 0.4 * 1]
    )  # the third: 0.6 < 2/3
    assert averaged is not None and averaged["n"].item() == 4


def test_the_average_is_no_view_of_the_state() -> None:
    state = {"w": torch.ones(2)}
    averaged = moving_average(None, state, 0.9, 1)
    state["w"].zero_()
    assert averaged["w"].tolist() == [1.0, 1.0]


def test_high_decay_begins_as_the_mean_of_all_rounds() -> None:
    averaged = None
    for number in range(1, 6):
        averaged = moving_average(averaged, {"w": torch.tensor([float(number)])}, 0.99, number)
    assert averaged is not None and averaged["w"].item() == pytest.approx(3.0)
