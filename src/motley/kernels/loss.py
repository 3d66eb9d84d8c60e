"""Mean cross-entropy and its gradient in one kernel, for a batch that one program can hold."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from motley.kernels import LENGTHS

MOST = 2**14
"""Answers times classes, each rounded up to a power of two."""


@triton.jit(do_not_specialize=LENGTHS)
def _cross_entropy(answers, labels, loss, gradient, count, classes, ROWS: tl.constexpr, CLASSES: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, CLASSES)
    inside = (row < count)[:, None] & (column < classes)[None, :]
    at = row[:, None] * classes + column[None, :]
    values = tl.load(answers + at, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where((row < count)[:, None], values, 0.0)
    values -= tl.max(values, 1)[:, None]
    powers = tl.exp(values)
    total = tl.sum(powers, 1)
    right = column[None, :] == tl.load(labels + row, mask=row < count, other=0)[:, None]
    errors = tl.log(total) - tl.sum(tl.where(right, values, 0.0), 1)
    tl.store(loss, tl.sum(tl.where(row < count, errors, 0.0), 0) / count)
    difference = (powers / total[:, None] - right.to(tl.float32)) / count
    tl.store(gradient + at, difference.to(gradient.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, answers: Tensor, labels: Tensor) -> Tensor:
        count, classes = answers.shape
        answers = answers.contiguous()
        loss, gradient = torch.empty((), device=answers.device), torch.empty_like(answers, dtype=torch.float32)
        tile = {"ROWS": triton.next_power_of_2(count), "CLASSES": triton.next_power_of_2(classes)}
        _cross_entropy[(1,)](answers, labels, loss, gradient, count, classes, **tile)
        ctx.save_for_backward(gradient)
        ctx.dtype = answers.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None


def applies(answers: Tensor) -> bool:
    """Tell whether one program can hold a batch's answers."""
    count, classes = answers.shape
    return triton.next_power_of_2(count) * triton.next_power_of_2(classes) <= MOST


def cross_entropy(answers: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in single precision."""
    result: Tensor = _CrossEntropy.apply(answers, labels)
    return result
