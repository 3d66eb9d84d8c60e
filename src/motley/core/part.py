"""A client holds a part of one global state.

The global state is a flat mapping from names to tensors. A part maps a client's own parameter and buffer names to a
global name and an index: `None` for the whole tensor, or one slice or index vector a dimension. Depth, width, both at
once, and architectures that share nothing are all parts; `take` here and `merge` in `motley.core.merge` are the
only two functions that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from motley.core.async_copy import to_device

State: TypeAlias = dict[str, Tensor]
Index: TypeAlias = tuple[slice | Tensor, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one of a client's tensors lies in the global state. Index vectors name each position once."""

    name: str
    index: Index | None = None


Part: TypeAlias = Mapping[str, Piece]


def by_type(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return floating tensors and others apart: torch groups an operation over many tensors if they are of one kind."""
    floating: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        (floating if tensor.is_floating_point() else others).append(tensor)
    return floating, others


def take(state: Mapping[str, Tensor], part: Part) -> State:
    """Return a client's state. Whole tensors and slices are views of `state`: whoever trains on them copies first."""
    return {local: select(state[piece.name], piece.index) for local, piece in part.items()}


def select(tensor: Tensor, index: Index | None) -> Tensor:
    """Return the block of `tensor` that `index` names: the outer product of its dimensions' choices."""
    if index is None:
        return tensor
    if is_view(index):
        return tensor[index]
    for dim, chosen in enumerate(index):
        if isinstance(chosen, slice):
            tensor = tensor[(slice(None),) * dim + (chosen,)]
        else:
            tensor = tensor.index_select(dim, to_device(chosen, tensor.device))
    return tensor


def is_view(index: Index) -> bool:
    """Tell whether the block that an index names is a view: slices alone."""
    return all(isinstance(chosen, slice) for chosen in index)


def add_at(tensor: Tensor, index: Index | None, value: Tensor | float) -> None:
    """Add `value` to the block of `tensor` that `index` names, in place: the counterpart of `select`."""
    if index is None or is_view(index):
        select(tensor, index).add_(value)
        return
    tensor[open_grid(tensor, index)] += value


def open_grid(tensor: Tensor, index: Index) -> tuple[Tensor, ...]:
    """Return an index as vectors on the tensor's device that name the same block together."""
    positions = [
        torch.arange(tensor.shape[dim], device=tensor.device)[chosen]
        if isinstance(chosen, slice)
        else to_device(chosen, tensor.device)
        for dim, chosen in enumerate(index)
    ]
    last = tensor.dim() - 1
    return tuple(where.view(-1, *(1,) * (last - dim)) for dim, where in enumerate(positions))
