"""Arithmetic on tensors by name, with one grouped call for all tensors of a model.

A model has a hundred tensors, and a GPU that adds them one by one waits for the host a hundred
times. The functions here hand all of them to torch's grouped kernels (`torch._foreach_*`) at once.
Those whose names end with an underscore change their first argument in place, so a captured CUDA
graph finds the same tensors in every replay.

Functions of two arguments work on the names that both have, just as a part has some of the names of
the global state: a received state has buffers, for example, and gradients have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from motley.core.part import State, by_type

Tensors: TypeAlias = Mapping[str, Tensor]
#: A number, a tensor with one value (which is not read by the host), or one number per name.
Factor: TypeAlias = float | Tensor | Mapping[str, float]


def add_(target: Tensors, values: Tensors, factor: Factor = 1.0) -> None:
    """Compute `target += factor * values`."""
    names, into, given = _paired(target, values)
    if not names:
        return
    if isinstance(factor, Tensor | Mapping):
        torch._foreach_add_(into, _multiplied(names, given, factor))
    else:
        torch._foreach_add_(into, given, alpha=factor)


def subtract_(target: Tensors, values: Tensors, factor: Factor = 1.0) -> None:
    """Compute `target -= factor * values`."""
    names, into, given = _paired(target, values)
    if not names:
        return
    if isinstance(factor, Tensor | Mapping):
        torch._foreach_sub_(into, _multiplied(names, given, factor))
    else:
        torch._foreach_sub_(into, given, alpha=factor)


def scale_(target: Tensors, factor: float | Tensor) -> None:
    """Compute `target *= factor`."""
    if target:
        torch._foreach_mul_(list(target.values()), factor)


def divide_(target: Tensors, divisor: float | Tensor) -> None:
    """Compute `target /= divisor`."""
    if target:
        torch._foreach_div_(list(target.values()), divisor)


def copy_(target: Tensors, values: Tensors) -> None:
    """Copy `values` into `target`."""
    names, into, given = _paired(target, values)
    if names:
        torch._foreach_copy_(into, given)


def swap_(first: Tensors, second: Tensors) -> None:
    """Exchange the values of two states with the same names, in place."""
    _, first_tensors, second_tensors = _paired(first, second)
    pairs_of_type = zip(by_type(first_tensors), by_type(second_tensors), strict=True)
    for ours, theirs in pairs_of_type:
        if ours:
            copies = [torch.empty_like(tensor) for tensor in ours]
            torch._foreach_copy_(copies, ours)
            torch._foreach_copy_(ours, theirs)
            torch._foreach_copy_(theirs, copies)


def total(first: Tensors, second: Tensors) -> State:
    """Return `first + second`."""
    names, first_tensors, second_tensors = _paired(first, second)
    if not names:
        return {}
    return dict(zip(names, torch._foreach_add(first_tensors, second_tensors), strict=True))


def difference(first: Tensors, second: Tensors) -> State:
    """Return `first - second`."""
    names, first_tensors, second_tensors = _paired(first, second)
    if not names:
        return {}
    return dict(zip(names, torch._foreach_sub(first_tensors, second_tensors), strict=True))


def scaled(values: Tensors, factor: Factor) -> State:
    """Return `factor * values`."""
    names = list(values)
    if not names:
        return {}
    return dict(zip(names, _multiplied(names, list(values.values()), factor), strict=True))


def divided(values: Tensors, divisor: float | Tensor) -> State:
    """Return `values / divisor`."""
    if not values:
        return {}
    return dict(zip(values, torch._foreach_div(list(values.values()), divisor), strict=True))


def norms(values: Tensors) -> State:
    """Return the norm of every tensor."""
    return dict(zip(values, torch._foreach_norm(list(values.values())), strict=True))


def norm(values: Tensors) -> Tensor:
    """Return the norm of all tensors together, as a tensor with one value."""
    return torch.stack(list(norms(values).values())).norm()


def max_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest absolute value, on the tensors' device, without waiting for the device.

    It is NaN or infinite exactly if one of the values is. The tensors are read in one grouped pass
    and not changed. Integers are left out; without other values the result is 0.
    """
    tensors = list(tensors)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        return torch.zeros((), device=tensors[0].device if tensors else None)
    largest = [_largest(alike).double() for alike in by_dtype.values()]
    return largest[0] if len(largest) == 1 else torch.stack(largest).amax()


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest absolute value of tensors of one type; NaN if one of them holds a NaN."""
    if tensors[0].device.type == "cpu":
        # Ten times as fast as this norm on a CPU, which torch computes value by value.
        extremes: list[Tensor] = []
        for tensor in tensors:
            extremes += torch.aminmax(tensor)
        return torch.stack(extremes).abs().amax()
    # Not torch.nn.utils.get_total_norm, which takes the host longer: there is one call per client
    # and round.
    return torch.stack(torch._foreach_norm(tensors, math.inf)).amax()


def _paired(first: Tensors, second: Tensors) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Return the names that both have, and both tensors of each."""
    names = [name for name in first if name in second]
    return names, [first[name] for name in names], [second[name] for name in names]


def _multiplied(names: list[str], tensors: list[Tensor], factor: Factor) -> tuple[Tensor, ...]:
    if isinstance(factor, Mapping):
        return torch._foreach_mul(tensors, [factor[name] for name in names])
    return torch._foreach_mul(tensors, factor)
