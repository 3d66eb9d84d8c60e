"""Parts: which tensors, and which slices of them, of the global state a client holds.

The global state is a flat mapping from names to tensors. A part maps a client's own parameter and
buffer names to a global name and an index: None for the whole tensor, or one slice or index vector
per dimension. Splits by depth, by width and by both, and architectures that share nothing, are all
parts. `take` extracts a client's state, and `merge` in `motley.core.merge` averages the deltas.
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
    """The location of one of a client's tensors in the global state.

    An index vector must not contain a position twice: `merge` adds to the selected block in place,
    which would count only one of the two values.
    """

    name: str
    index: Index | None = None


Part: TypeAlias = Mapping[str, Piece]


def by_type(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point tensors and the others.

    torch's grouped operations (`_foreach_*`) are fast only if all tensors have one dtype.
    """
    floating: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_floating_point():
            floating.append(tensor)
        else:
            others.append(tensor)
    return floating, others


def take(state: Mapping[str, Tensor], part: Part) -> State:
    """Return a client's state.

    Whole tensors and slices are views of `state`, so copy them before training.
    """
    return {local: select(state[piece.name], piece.index) for local, piece in part.items()}


def size_in_bytes(state: Mapping[str, Tensor]) -> int:
    """Return how many bytes a state takes when it is sent."""
    return sum(tensor.nbytes for tensor in state.values())


def select(tensor: Tensor, index: Index | None) -> Tensor:
    """Return the block of `tensor` that `index` selects, one choice per dimension."""
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
    """Tell whether the block that `index` selects is a view: whether it has only slices."""
    return all(isinstance(chosen, slice) for chosen in index)


def add_at(tensor: Tensor, index: Index | None, value: Tensor | float) -> None:
    """Add `value` in place to the block of `tensor` that `index` selects; see `select`."""
    if index is None or is_view(index):
        select(tensor, index).add_(value)
        return
    tensor[open_grid(tensor, index)] += value


def open_grid(tensor: Tensor, index: Index) -> tuple[Tensor, ...]:
    """Return `index` as index vectors that broadcast against each other, as np.ix_ does.

    Advanced indexing needs this to select a block instead of a list of points.
    """
    last = tensor.dim() - 1
    grid = []
    for dim, chosen in enumerate(index):
        if isinstance(chosen, slice):
            positions = torch.arange(tensor.shape[dim], device=tensor.device)[chosen]
        else:
            positions = to_device(chosen, tensor.device)
        grid.append(positions.view(-1, *(1,) * (last - dim)))
    return tuple(grid)
