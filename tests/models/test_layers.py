"""Layers with more to them than torch's."""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from motley.kernels import twin
from motley.models.layers import BatchNorm, _with_second, apart, second_use


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("kind", [BatchNorm, nn.BatchNorm2d])
def test_two_batches_apart_are_two_passes(kind: type[nn.BatchNorm2d], both: bool) -> None:
    torch.manual_seed(0)
    joined = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4))
    twice = deepcopy(joined)
    first, others = torch.randn(5, 3, 2, 2), 2 + torch.randn(7, 3, 2, 2)
    with apart(joined, 5, both=both):
        y = joined(torch.cat([first, others]))
    kept = [buffer.clone() for buffer in twice.buffers()]
    behind = twice(others)
    if not both:
        for buffer, value in zip(twice.buffers(), kept, strict=True):
            buffer.data.copy_(value)
    expected = torch.cat([twice(first), behind])
    torch.testing.assert_close(y, expected)
    for answers in (y, expected):
        answers.square().sum().backward()
    torch.testing.assert_close([p.grad for p in joined.parameters()], [p.grad for p in twice.parameters()])
    torch.testing.assert_close(dict(joined.named_buffers()), dict(twice.named_buffers()))


def test_afterwards_a_batch_is_one_again() -> None:
    norm = BatchNorm(2)
    x = torch.randn(4, 2, 1, 1)
    with pytest.raises(RuntimeError), apart(norm, 2, both=True):
        norm(torch.randn(4, 3, 1, 1))
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(2)(x))


def test_an_addition_is_cut_as_well() -> None:
    norm = BatchNorm(2)
    x, add = torch.randn(6, 2, 3, 3), torch.randn(6, 2, 3, 3)
    with apart(norm, 2, both=True):
        y = norm(x, add=add, relu=True)
    torch.testing.assert_close(y, torch.cat([norm(x[:2], add[:2], relu=True), norm(x[2:], add[2:], relu=True)]))


class _Twice(torch.autograd.Function):
    """Stands for a kernel whose output has two uses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        y = 2 * x
        return y, twin(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor:
        first, second = gradients
        assert first is not None and second is not None
        return 2 * first + 20 * second


@pytest.mark.parametrize("training", [False, True])
def test_an_output_for_two_uses_has_two_gradients_and_is_freed(training: bool) -> None:
    """A view in its place would hold what holds it, and not even Python's collector would find them."""
    x = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(training):
        y = _with_second(*_Twice.apply(x))
    assert second_use(y) is not y and torch.equal(second_use(y), y)
    if training:
        (y + 3 * second_use(y)).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [62.0] * 3
    gone = weakref.ref(y)
    del y
    assert gone() is None
