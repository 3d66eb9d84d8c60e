"""Layers with more to them than torch's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from motley.models.layers import apart


@pytest.mark.parametrize("both", [True, False])
def test_two_batches_apart_are_two_passes(both: bool) -> None:
    torch.manual_seed(0)
    joined = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
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
    norm = nn.BatchNorm2d(2)
    x = torch.randn(4, 2, 1, 1)
    with pytest.raises(RuntimeError), apart(norm, 2, both=True):
        norm(torch.randn(4, 3, 1, 1))
    torch.testing.assert_close(norm(x), nn.BatchNorm2d(2)(x))
