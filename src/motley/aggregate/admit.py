"""Nothing that a client sends is trusted: an upload that does not fit is refused, and the round goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from motley.errors import unknown


def misfit(expected: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> str | None:
    """Say why a change does not fit the part that was sent out, or None where it does."""
    for name in change:
        if name not in expected:
            return unknown("name", name, expected)
    for name, tensor in expected.items():
        if name not in change:
            return f"{name!r} is missing."
        if change[name].shape != tensor.shape:
            return f"{name!r} has shape {tuple(change[name].shape)}; {tuple(tensor.shape)} was sent out."
        if change[name].dtype != tensor.dtype:
            return f"{name!r} is {change[name].dtype}; {tensor.dtype} was sent out."
    return None


def finite(changes: Sequence[Mapping[str, Tensor]]) -> list[bool]:
    """Tell which changes hold finite numbers only; the device is asked once for all of them."""
    floats = [[tensor for tensor in change.values() if tensor.is_floating_point()] for change in changes]
    every = [tensor for own in floats for tensor in own]
    good = iter(torch.stack(torch._foreach_norm(every, ord=float("inf"))).isfinite().tolist() if every else [])
    return [all([next(good) for _ in own]) for own in floats]
