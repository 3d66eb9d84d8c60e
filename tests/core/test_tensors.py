"""Grouped arithmetic on named tensors against plain arithmetic on each of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from motley.core.part import State
from motley.core.tensors import (
    Factor,
    add_,
    copy_,
    difference,
    divide_,
    divided,
    max_norm,
    norm,
    norms,
    scale_,
    scaled,
    subtract_,
    total,
)


def states() -> tuple[State, State]:
    numbers = torch.Generator().manual_seed(0)
    first = {name: torch.randn(3, 2, generator=numbers) for name in ("a", "b", "buffer")}
    second = {name: torch.randn(3, 2, generator=numbers) for name in ("other", "b", "a")}
    return first, second


@pytest.mark.parametrize(
    "factor", [2.0, torch.tensor(2.0), {"a": 2.0, "b": 2.0}], ids=["number", "tensor", "mapping"]
)
@pytest.mark.parametrize(("function", "sign"), [(add_, 1), (subtract_, -1)])
def test_in_place_sums_change_common_names_only_and_stay_in_place(
    function: Callable[..., None], sign: int, factor: Factor
) -> None:
    target, values = states()
    before = {name: tensor.clone() for name, tensor in target.items()}
    addresses = [tensor.data_ptr() for tensor in target.values()]
    function(target, values, factor)
    assert [tensor.data_ptr() for tensor in target.values()] == addresses
    for name in ("a", "b"):
        torch.testing.assert_close(target[name], before[name] + sign * 2 * values[name])
    assert torch.equal(target["buffer"], before["buffer"]) and "other" not in target


def test_sums_and_differences_have_the_common_names() -> None:
    first, second = states()
    assert list(total(first, second)) == list(difference(first, second)) == ["a", "b"]
    assert torch.equal(total(first, second)["a"], first["a"] + second["a"])
    assert torch.equal(difference(first, second)["b"], first["b"] - second["b"])


def test_scaling_and_dividing() -> None:
    first, _ = states()
    before = {name: tensor.clone() for name, tensor in first.items()}
    assert torch.equal(scaled(first, 3.0)["a"], 3 * before["a"])
    assert torch.equal(scaled(first, {"a": 1, "b": 2, "buffer": 3})["buffer"], 3 * before["buffer"])
    assert torch.equal(divided(first, torch.tensor(4.0))["a"], before["a"] / 4)
    scale_(first, torch.tensor(3.0))
    divide_(first, 2)
    assert torch.equal(first["b"], 3 * before["b"] / 2)


def test_norms_and_copies() -> None:
    first, second = states()
    assert torch.equal(norms(first)["a"], first["a"].norm())
    whole = torch.cat([tensor.flatten() for tensor in first.values()]).norm()
    torch.testing.assert_close(norm(first), whole)
    copy_(first, second)
    assert torch.equal(first["a"], second["a"]) and not torch.equal(
        first["buffer"], second["other"]
    )


def test_nothing_in_common_is_nothing_to_do() -> None:
    target = {"a": torch.ones(2)}
    add_(target, {"b": torch.ones(2)})
    subtract_(target, {})
    copy_(target, {})
    scale_({}, 2.0)
    divide_({}, 2.0)
    assert torch.equal(target["a"], torch.ones(2))
    assert total(target, {}) == difference({}, target) == scaled({}, 2.0) == divided({}, 2.0) == {}


@pytest.mark.parametrize("special", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_largest_absolute_value_is_torchs_norm(
    dtype: torch.dtype, special: float | None
) -> None:
    numbers = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=numbers).to(dtype) for shape in ((40, 7), (), (3,))]
    tensors[0] = tensors[0].t()
    tensors[1].fill_(-9.0)
    if special is not None:
        tensors[0][3, 5] = special
    plain = torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]).amax()
    largest = max_norm([*tensors, torch.zeros(0), torch.tensor(100), torch.full((2,), 0.5)])
    assert largest.dtype == torch.float64 and largest.dim() == 0
    assert torch.equal(largest, plain.double()) or (largest.isnan() and plain.isnan())
    assert special is not None or largest == 9


def test_the_largest_absolute_value_of_nothing_and_of_zeros_is_zero() -> None:
    assert max_norm([]) == 0 and max_norm([torch.tensor(3)]) == 0
    assert not max_norm([-torch.zeros(4)]).signbit()
