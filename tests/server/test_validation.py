"""Updates that are not valid are rejected with a reason."""

from __future__ import annotations

import math
import re

import pytest
import torch

from motley.core.update import ClientUpdate
from motley.server.validation import UpdateCheck, has_nonfinite, shape_error

SENT = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        ({"w": torch.zeros(2, 3)}, "'n' is missing"),
        ({"w": torch.zeros(3, 2), "n": torch.tensor(0)}, r"\(3, 2\); \(2, 3\) was sent out"),
        ({"w": torch.zeros(2, 3), "n": torch.tensor(0), "v": torch.zeros(1)}, "unknown name 'v'"),
        ({"w": torch.zeros(2, 3).double(), "n": torch.tensor(0)}, "float64"),
    ],
)
def test_what_does_not_fit_is_named(delta: dict[str, torch.Tensor], words: str) -> None:
    reason = shape_error(SENT, delta)
    assert reason is not None
    assert re.search(words, reason)


def test_a_delta_that_fits_is_accepted() -> None:
    assert shape_error(SENT, {"n": torch.tensor(3), "w": torch.ones(2, 3)}) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_numbers_that_are_not_finite_are_found(bad: float, dtype: torch.dtype) -> None:
    fine = [
        torch.ones(3),
        torch.tensor([1.0, 2.0], dtype=dtype),
        torch.tensor(2**40),
        torch.zeros(0),
    ]
    assert not has_nonfinite(fine)
    assert has_nonfinite([*fine, torch.tensor([[1.0, bad], [0.0, 2.0]], dtype=dtype)])
    assert not has_nonfinite([torch.tensor(1)]) and not has_nonfinite([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_largest_finite_numbers_are_accepted(dtype: torch.dtype) -> None:
    """The check must not overflow itself, as a sum of squares would."""
    largest = torch.finfo(dtype).max
    assert not has_nonfinite([torch.ones(2), torch.full((100,), largest, dtype=dtype)])


def test_the_check_does_not_write_to_updates() -> None:
    """A tensor that may not be written to, such as one that is shared, is only read."""
    update = ClientUpdate(client=0, delta={"w": torch.ones(1).expand(4)}, loss=torch.tensor(1.0))
    version = update.delta["w"]._version
    assert UpdateCheck([update]).verdict.accepted == [update]
    assert update.delta["w"]._version == version


def update_of(client: int, weight: float, loss: float, **payload: torch.Tensor) -> ClientUpdate:
    delta = {"w": torch.tensor([weight])}
    return ClientUpdate(client=client, delta=delta, payload=payload, loss=torch.tensor(loss))


def test_the_verdict_names_every_reason_and_averages_the_losses_of_the_others() -> None:
    updates = [
        update_of(0, 1.0, 2.0),
        update_of(1, math.nan, 1.0),
        update_of(2, 1.0, math.inf),
        update_of(3, 1.0, 1.0, c=torch.tensor([math.inf])),
        update_of(4, 1.0, 4.0),
        update_of(5, 1.0, 9.0),
    ]

    def payload_error(update: ClientUpdate) -> str | None:
        return "it is no good." if update.client == 5 else None

    verdict = UpdateCheck(updates, payload_error=payload_error).verdict
    assert [update.client for update in verdict.accepted] == [0, 4]
    assert verdict.rejected == {
        1: "it holds a number that is not finite.",
        2: "its loss is not finite.",
        3: "it holds a number that is not finite.",
        5: "it is no good.",
    }
    assert verdict.train_loss == 3.0


def test_without_reported_losses_none_is_asked_for() -> None:
    """With differential privacy, clients do not say how well they fit their data."""
    verdict = UpdateCheck([update_of(0, 1.0, math.nan)], losses_are_reported=False).verdict
    assert len(verdict.accepted) == 1 and math.isnan(verdict.train_loss)


def test_no_updates_at_all() -> None:
    verdict = UpdateCheck([]).verdict
    assert not verdict.accepted and not verdict.rejected and math.isnan(verdict.train_loss)
