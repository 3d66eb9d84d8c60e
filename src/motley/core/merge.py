"""Bring the clients' changes together: the mean of every coordinate over the clients that hold it.

Four rules, each one a mistake that public implementations have made:

- a coordinate is averaged over its owners of this round, never over all clients; one that nobody held keeps its value;
- corrections (server step sizes, InCo, optimisers) are for parameters; floating buffers get the plain mean;
- `running_var` never goes below zero and integer buffers stay integers;
- changes are added in the order of client ids, so it does not matter who finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motley.core.async_copy import tensor_on
from motley.core.part import Index, Piece, State, add_at, is_view, open_grid, select
from motley.core.update import ClientUpdate


@dataclass(frozen=True)
class Aggregate:
    """The mean delta under global names.

    `covered[name]` says which coordinates had an owner; None means all of them.
    """

    delta: State
    covered: dict[str, Tensor | None]

    def with_delta(self, delta: State) -> Aggregate:
        """Return the same coverage with another delta."""
        return replace(self, delta=delta)


def merge(state: Mapping[str, Tensor], updates: Iterable[ClientUpdate]) -> Aggregate:
    """Return the weighted mean change of every coordinate over its owners; names without an owner are absent.

    Whole tensors have one weight a name and are added a client at a time in one grouped call, and so are slices;
    pieces, and tensors of which not all rows count, carry a weight a coordinate; integers are few, and are summed in
    double precision.
    """
    totals: State = {}
    whole: dict[str, float] = {}
    pieces = _Pieces(state, totals)
    integers: dict[str, list[tuple[Tensor, float]]] = {}
    for update in sorted(updates, key=lambda update: update.client):
        if not update.weight > 0:
            raise ValueError(f"client {update.client} has weight {update.weight}; a weight must be positive")
        fresh: State = {}
        into, values = [], []
        for local, piece in update.part.items():
            name, index, value = piece.name, piece.index, update.delta[local]
            if index is None and not value.is_floating_point():
                integers.setdefault(name, []).append((value, update.weight))
                continue
            if local in update.row_weights:
                pieces.add_rows(piece, value, update.weight * update.row_weights[local])
            elif index is None:
                whole[name] = whole.get(name, 0.0) + update.weight
                if name in totals:
                    into.append(totals[name])
                    values.append(value)
                else:
                    fresh[name] = value
            else:
                pieces.add(piece, value, update.weight)
        pieces.flush(update.weight)
        if into:
            torch._foreach_add_(into, values, alpha=update.weight)
        if fresh:
            totals.update(zip(fresh, torch._foreach_mul(list(fresh.values()), update.weight), strict=True))
    covered = _divide(totals, whole, pieces.weights())
    means = _integer_means(integers)
    return Aggregate({**totals, **means}, {**covered, **dict.fromkeys(means)})


@dataclass
class _Place:
    """Where a piece lies in its tensor, as a view's index or as vectors on the device, and what its owners weigh."""

    piece: Piece
    where: Index
    view: Tensor | None
    weight: float = 0.0


class _Pieces:
    """Adds pieces to the totals, and keeps their weights.

    A federation in width has hundreds of pieces a client. So where a piece lies is found once, not once a client; a
    client's slices are added in one call; and weights are added up a piece before they are spread out.
    """

    def __init__(self, state: Mapping[str, Tensor], totals: State) -> None:
        self._state, self._totals = state, totals
        self._places: dict[int, _Place] = {}
        self._into: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: list[tuple[_Place, Tensor]] = []

    def add(self, piece: Piece, value: Tensor, weight: float) -> None:
        """Add a client's value: slices with its other ones, at `flush`."""
        place = self._place(piece)
        place.weight += weight
        if place.view is not None:
            self._into.append(place.view)
            self._values.append(value)
        else:
            self._totals[piece.name][place.where] += value * weight

    def add_rows(self, piece: Piece, value: Tensor, weights: Tensor) -> None:
        """Add a client's value whose every row has a weight of its own."""
        place = self._place(piece)
        weights = weights.view(-1, *(1,) * (value.dim() - 1))
        self._totals[piece.name][place.where] += value * weights
        self._rows.append((place, weights))

    def _place(self, piece: Piece) -> _Place:
        """Return a piece's place, which keeps it, so that no other one can have its number."""
        if found := self._places.get(id(piece)):
            return found
        if piece.name not in self._totals:
            self._totals[piece.name] = torch.zeros_like(self._state[piece.name])
        total = self._totals[piece.name]
        index = piece.index if piece.index is not None else (slice(None),) * total.dim()
        place = _Place(piece, index, total[index]) if is_view(index) else _Place(piece, open_grid(total, index), None)
        self._places[id(piece)] = place
        return place

    def flush(self, weight: float) -> None:
        """Add the slices of one client, which has this weight."""
        if self._into:
            torch._foreach_add_(self._into, self._values, alpha=weight)
        self._into, self._values = [], []

    def weights(self) -> State:
        """Return what every coordinate's owners weigh together."""
        weights: State = {}
        for place in self._places.values():
            name = place.piece.name
            if name not in weights:
                weights[name] = torch.zeros_like(self._totals[name])
            weights[name][place.where] += place.weight
        for place, own in self._rows:
            weights[place.piece.name][place.where] += own
        return weights


def _divide(totals: State, whole: dict[str, float], pieces: State) -> dict[str, Tensor | None]:
    """Divide every sum by its weight, in place; return which coordinates had an owner."""
    full = [name for name in totals if name not in pieces]
    if full:
        torch._foreach_div_([totals[name] for name in full], [whole[name] for name in full])
    covered: dict[str, Tensor | None] = dict.fromkeys(totals)
    for name, weights in pieces.items():
        weight = weights + whole.get(name, 0.0)
        covered[name] = None if name in whole else weight > 0
        totals[name].div_(torch.where(weight > 0, weight, 1))
    return covered


def _integer_means(integers: dict[str, list[tuple[Tensor, float]]]) -> State:
    """Return the weighted means of integer tensors, cut to whole numbers, with one sum for all of them."""
    if not integers:
        return {}
    firsts = [values[0][0] for values in integers.values()]
    owner: list[int] = []
    shares: list[float] = []
    start = 0
    for values in integers.values():
        total, count = sum(weight for _, weight in values), values[0][0].numel()
        for _, weight in values:
            owner.extend(range(start, start + count))
            shares.extend([weight / total] * count)
        start += count
    device = firsts[0].device
    flat = torch.cat([value.reshape(-1) for values in integers.values() for value, _ in values])
    sums = torch.zeros(start, dtype=torch.float64, device=device)
    weighted = flat.double() * tensor_on(shares, torch.float64, device)
    sums.index_add_(0, tensor_on(owner, torch.long, device), weighted)
    whole = (sums + 1e-9 * sums.sign()).trunc()
    parts = whole.split([first.numel() for first in firsts])
    return {
        name: part.reshape(first.shape).to(first.dtype)
        for name, part, first in zip(integers, parts, firsts, strict=True)
    }


def add_shares(
    state: Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    values: Callable[[ClientUpdate], Mapping[str, Tensor]],
    owners: Callable[[str, torch.device], int | Tensor],
) -> State:
    """Return `state` plus the clients' values, each divided by the number of all its owners, present or not.

    This keeps a state equal to the mean over all owners of something that only those who take part change: control
    variates, dual variables. Values of names that are not in `state` are left out.
    """
    after = {name: tensor.clone() for name, tensor in state.items()}
    for update in sorted(updates, key=lambda update: update.client):
        into, given, counts = [], [], []
        for local, value in values(update).items():
            name, index = update.part[local].name, update.part[local].index
            if name not in after:
                continue
            count = owners(name, after[name].device)
            if isinstance(count, Tensor):
                add_at(after[name], index, value / select(count, index))
            elif index is not None:
                add_at(after[name], index, value / count)
            else:
                into.append(after[name])
                given.append(value)
                counts.append(count)
        if into:
            torch._foreach_add_(into, torch._foreach_div(given, counts))
    return after


def apply(state: Mapping[str, Tensor], merged: Aggregate, parameters: Collection[str], step: float = 1.0) -> State:
    """Return the state after the change; `step` scales parameters only. What nobody held stays, bit for bit."""
    after = dict(state)
    for (scale, _), names in _alike(merged, parameters, step).items():
        sums = torch._foreach_add([state[name] for name in names], [merged.delta[name] for name in names], alpha=scale)
        after.update(zip(names, sums, strict=True))
    variances = [after[name] for name in merged.delta if name.endswith("running_var")]
    if variances:
        torch._foreach_clamp_min_(variances, 0.0)
    for name, mask in merged.covered.items():
        if mask is not None:
            after[name] = torch.where(mask, after[name], state[name])
    return after


def _alike(merged: Aggregate, parameters: Collection[str], step: float) -> dict[tuple[float, torch.dtype], list[str]]:
    """Group the changed names by the factor on their change and by type; buffers are never scaled."""
    groups: dict[tuple[float, torch.dtype], list[str]] = {}
    for name, change in merged.delta.items():
        scale = step if step != 1 and name in parameters else 1
        groups.setdefault((scale, change.dtype), []).append(name)
    return groups
