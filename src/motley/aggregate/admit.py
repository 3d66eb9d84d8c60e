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
    if not changes:
        return []
    return torch.stack([_all_finite(change) for change in changes]).tolist()


def _all_finite(change: Mapping[str, Tensor]) -> Tensor:
    floats = [tensor for tensor in change.values() if tensor.is_floating_point()]
    if not floats:
        return torch.tensor(True)
    return torch.stack(torch._foreach_norm(floats, ord=float("inf"))).isfinite().all()
