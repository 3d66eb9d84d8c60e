"""Nothing that a client sends is trusted: an upload that does not fit is refused, and the round goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def misfit(expected: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> str | None:
    """Say why a change does not fit the part that was sent out, or None where it does."""
    for name in change:
        if name not in expected:
            return f"unknown name {name!r}: it was not sent out."
    for name, tensor in expected.items():
        if name not in change:
            return f"{name!r} is missing."
        if change[name].shape != tensor.shape:
            return f"{name!r} has shape {tuple(change[name].shape)}; {tuple(tensor.shape)} was sent out."
        if change[name].dtype != tensor.dtype:
            return f"{name!r} is {change[name].dtype}; {tensor.dtype} was sent out."
    return None


def blemish(change: Mapping[str, Tensor]) -> Tensor:
    """Return, on the change's device, whether it holds a number that is not finite: a one, or else a zero."""
    floats = [tensor for tensor in change.values() if tensor.is_floating_point()]
    device = next(iter(change.values())).device
    found = torch.zeros((), device=device)
    for dtype in {tensor.dtype for tensor in floats}:
        alike = [tensor for tensor in floats if tensor.dtype == dtype]
        # torch's grouped check for such numbers also scales: by one
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, torch.ones((), device=device))
    return found


def unusable(what: str, use: Callable[[], object]) -> str | None:
    """Say why a method cannot use what a client sent it, by trying; or None where it can."""
    try:
        use()
    except Exception as error:
        return f"the method cannot use its {what}: {error!r}"
    return None
