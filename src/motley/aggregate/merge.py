"""Bring the clients' changes together: the mean of every coordinate over the clients that hold it.

Four rules, each one a mistake that public implementations have made:

- a coordinate is averaged over its owners of this round, never over all clients; one that nobody held keeps its value;
- corrections (server step sizes, InCo, optimisers) are for parameters; floating buffers get the plain mean;
- `running_var` never goes below zero and integer buffers stay integers;
- changes are added in the order of client ids, so it does not matter who finished first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from motley.splits.part import Part, State, add_at


@dataclass(frozen=True)
class Update:
    """What the server knows of one client's turn: which part it held, how it changed it, and the method's message."""

    client: int
    part: Part
    change: Mapping[str, Tensor]
    weight: float = 1.0
    size: str = ""
    message: State = field(default_factory=dict)
    samples: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Merged:
    """The mean change under its global names. `covered[name]` is None where every coordinate had an owner."""

    change: State
    covered: dict[str, Tensor | None]

    def with_change(self, change: State) -> Merged:
        """Return the same coverage with another change."""
        return replace(self, change=change)


def merge(state: Mapping[str, Tensor], updates: Iterable[Update]) -> Merged:
    """Return the weighted mean change of every coordinate over its owners; names without an owner are absent.

    Whole tensors have one weight a name and are added a client at a time in one grouped call; pieces carry a weight a
    coordinate.
    """
    totals: State = {}
    whole: dict[str, float] = {}
    pieces: State = {}
    for update in sorted(updates, key=lambda update: update.client):
        if not update.weight > 0:
            raise ValueError(f"client {update.client} has weight {update.weight}; a weight must be positive")
        into, values = [], []
        for local, piece in update.part.items():
            name, index = piece.name, piece.index
            if name not in totals:
                totals[name] = torch.zeros_like(state[name], dtype=_accumulator(state[name]))
            value = update.change[local].to(totals[name].dtype)
            if index is None:
                into.append(totals[name])
                values.append(value)
                whole[name] = whole.get(name, 0.0) + update.weight
            else:
                if name not in pieces:
                    pieces[name] = torch.zeros_like(totals[name])
                add_at(totals[name], index, value * update.weight)
                add_at(pieces[name], index, update.weight)
        if into:
            torch._foreach_add_(into, values, alpha=update.weight)
    return _divide(state, totals, whole, pieces)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float64


def _divide(state: Mapping[str, Tensor], totals: State, whole: dict[str, float], pieces: State) -> Merged:
    covered: dict[str, Tensor | None] = {}
    for name, total in totals.items():
        weight: Tensor | float = whole.get(name, 0.0)
        covered[name] = None
        if name in pieces:
            weight = pieces[name] + weight
            covered[name] = None if name in whole else weight > 0
            weight = torch.where(weight > 0, weight, 1)
        total.div_(weight)
    change = {name: _like(total, state[name]) for name, total in totals.items()}
    return Merged(change, covered)


def _like(total: Tensor, tensor: Tensor) -> Tensor:
    return total if tensor.is_floating_point() else total.trunc().to(tensor.dtype)


def apply(state: Mapping[str, Tensor], merged: Merged, parameters: Collection[str], step: float = 1.0) -> State:
    """Return the state after the change; `step` scales parameters only. What nobody held stays, bit for bit."""
    after = dict(state)
    for name, change in merged.change.items():
        value = state[name] + (change * step if step != 1 and name in parameters else change)
        if name.endswith("running_var"):
            value.clamp_(min=0)
        mask = merged.covered[name]
        after[name] = value if mask is None else torch.where(mask, value, state[name])
    return after
