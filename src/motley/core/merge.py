"""Average the clients' deltas: every coordinate over the clients that hold it, its owners.

Four rules, each of which some public implementation gets wrong:

- A coordinate is averaged over its owners in this round, never over all clients. A coordinate
  without an owner keeps its value.
- Corrections (server step sizes, InCo, optimisers) are for parameters. Floating-point buffers get
  the plain mean.
- `running_var` never becomes negative, and integer buffers stay integers.
- Deltas are added in the order of client ids, so the result does not depend on who finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from motley.core.async_copy import tensor_on
from motley.core.part import Index, Piece, State, add_at, is_view, open_grid, select
from motley.core.update import ClientUpdate


@dataclass(frozen=True)
class Aggregate:
    """The mean delta, by global names.

    `covered[name]` is a mask of the coordinates that had an owner, or None if all had one.
    `metrics` are numbers for the round's record; tensors have one element.
    """

    delta: State
    covered: dict[str, Tensor | None]
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)

    def with_delta(self, delta: State) -> Aggregate:
        """Return the same coverage with another delta."""
        return replace(self, delta=delta)


def merge(state: Mapping[str, Tensor], updates: Iterable[ClientUpdate]) -> Aggregate:
    """Return the weighted mean delta of every coordinate over its owners.

    Names without an owner are absent. There are three cases:

    - Whole tensors have one weight per name, and are added in one grouped call per client.
    - Pieces of tensors, and tensors with row weights, have a weight per coordinate (`_Pieces`).
    - Integer tensors are collected and averaged at the end in double precision.
    """
    totals: State = {}
    # The sum of the weights of the clients that hold the whole tensor, by name.
    whole_weights: dict[str, float] = {}
    pieces = _Pieces(state, totals)
    integers: dict[str, list[tuple[Tensor, float]]] = {}
    for update in sorted(updates, key=lambda update: update.client):
        if not update.weight > 0:
            raise ValueError(
                f"client {update.client} has weight {update.weight}; a weight must be positive"
            )
        # The first delta of a name becomes its total; later ones are added to that.
        first: State = {}
        into, values = [], []
        for local, piece in update.part.items():
            name, index, value = piece.name, piece.index, update.delta[local]
            if index is None and not value.is_floating_point():
                integers.setdefault(name, []).append((value, update.weight))
                continue
            if local in update.row_weights:
                pieces.add_rows(piece, value, update.weight * update.row_weights[local])
            elif index is None:
                whole_weights[name] = whole_weights.get(name, 0.0) + update.weight
                if name in totals:
                    into.append(totals[name])
                    values.append(value)
                else:
                    first[name] = value
            else:
                pieces.add(piece, value, update.weight)
        pieces.flush(update.weight)
        if into:
            torch._foreach_add_(into, values, alpha=update.weight)
        if first:
            weighted = torch._foreach_mul(list(first.values()), update.weight)
            totals.update(zip(first, weighted, strict=True))
    covered = _divide(totals, whole_weights, pieces.weights())
    means = _integer_means(integers)
    return Aggregate({**totals, **means}, {**covered, **dict.fromkeys(means)})


@dataclass
class _Place:
    """The location of a piece in the totals, and the sum of its owners' weights."""

    piece: Piece
    #: Slices, or index vectors on the device that broadcast to the block.
    index: Index
    #: The block of the total as a view, if `index` has only slices.
    view: Tensor | None
    weight: float = 0.0


class _Pieces:
    """Adds pieces of tensors to the totals, and sums up their weights.

    With a split by width, a client has hundreds of pieces, and all clients of a size share the same
    `Piece` objects. Three things keep this fast: a piece's index is prepared once and not once per
    client, a client's slices are added in one grouped call, and weights are summed up per piece
    before they are written to coordinates.
    """

    def __init__(self, state: Mapping[str, Tensor], totals: State) -> None:
        self._state, self._totals = state, totals
        # By id(piece), because the index of a Piece may not be hashable.
        self._places: dict[int, _Place] = {}
        # The current client's slices, until `flush`.
        self._into: list[Tensor] = []
        self._values: list[Tensor] = []
        self._row_weights: list[tuple[_Place, Tensor]] = []

    def add(self, piece: Piece, value: Tensor, weight: float) -> None:
        """Add a client's value. Slices are only collected here, and added by `flush`."""
        place = self._place(piece)
        place.weight += weight
        if place.view is not None:
            self._into.append(place.view)
            self._values.append(value)
        else:
            self._totals[piece.name][place.index] += value * weight

    def add_rows(self, piece: Piece, value: Tensor, weights: Tensor) -> None:
        """Add a client's value that has one weight per row."""
        place = self._place(piece)
        weights = weights.view(-1, *(1,) * (value.dim() - 1))
        self._totals[piece.name][place.index] += value * weights
        self._row_weights.append((place, weights))

    def _place(self, piece: Piece) -> _Place:
        """Look up the place of `piece`, or create it.

        The place holds a reference to the piece, so `id(piece)` cannot be reused meanwhile.
        """
        if id(piece) in self._places:
            return self._places[id(piece)]
        if piece.name not in self._totals:
            self._totals[piece.name] = torch.zeros_like(self._state[piece.name])
        total = self._totals[piece.name]
        index = piece.index if piece.index is not None else (slice(None),) * total.dim()
        if is_view(index):
            place = _Place(piece, index, total[index])
        else:
            place = _Place(piece, open_grid(total, index), None)
        self._places[id(piece)] = place
        return place

    def flush(self, weight: float) -> None:
        """Add the collected slices of one client, which has this weight."""
        if self._into:
            torch._foreach_add_(self._into, self._values, alpha=weight)
        self._into, self._values = [], []

    def weights(self) -> State:
        """Return the sum of the owners' weights for every coordinate of every name with pieces."""
        weights: State = {}
        for place in self._places.values():
            name = place.piece.name
            if name not in weights:
                weights[name] = torch.zeros_like(self._totals[name])
            weights[name][place.index] += place.weight
        for place, row_weights in self._row_weights:
            weights[place.piece.name][place.index] += row_weights
        return weights


def _divide(
    totals: State, whole_weights: dict[str, float], piece_weights: State
) -> dict[str, Tensor | None]:
    """Divide every sum by its weight in place, and return a mask of the coordinates with an owner.

    A name can have both kinds of weights: some clients hold the whole tensor, others a piece of it.
    """
    only_whole = [name for name in totals if name not in piece_weights]
    if only_whole:
        torch._foreach_div_(
            [totals[name] for name in only_whole], [whole_weights[name] for name in only_whole]
        )
    covered: dict[str, Tensor | None] = dict.fromkeys(totals)
    for name, weights in piece_weights.items():
        weight = weights + whole_weights.get(name, 0.0)
        covered[name] = None if name in whole_weights else weight > 0
        totals[name].div_(torch.where(weight > 0, weight, 1))
    return covered


def _integer_means(integers: dict[str, list[tuple[Tensor, float]]]) -> State:
    """Return the weighted means of integer tensors, truncated to integers.

    They are tiny (`num_batches_tracked` of each BatchNorm is one number), so the values of all
    clients are concatenated and summed with a single `index_add_`.
    """
    if not integers:
        return {}
    examples = [values[0][0] for values in integers.values()]
    flat_values: list[Tensor] = []
    # For each element of the concatenation: its position among the sums, and its share of the mean.
    positions: list[int] = []
    shares: list[float] = []
    start = 0
    for values in integers.values():
        total_weight = sum(weight for _, weight in values)
        count = values[0][0].numel()
        for value, weight in values:
            flat_values.append(value.reshape(-1))
            positions.extend(range(start, start + count))
            shares.extend([weight / total_weight] * count)
        start += count
    device = examples[0].device
    sums = torch.zeros(start, dtype=torch.float64, device=device)
    weighted = torch.cat(flat_values).double() * tensor_on(shares, torch.float64, device)
    sums.index_add_(0, tensor_on(positions, torch.long, device), weighted)
    # Shares add up to 1 only up to rounding. Without the nudge, a mean of 3 could become 2.
    integral = (sums + 1e-9 * sums.sign()).trunc()
    means: State = {}
    chunks = integral.split([example.numel() for example in examples])
    for name, chunk, example in zip(integers, chunks, examples, strict=True):
        means[name] = chunk.reshape(example.shape).to(example.dtype)
    return means


def add_shares(
    state: Mapping[str, Tensor],
    updates: Iterable[ClientUpdate],
    values: Callable[[ClientUpdate], Mapping[str, Tensor]],
    owners: Callable[[str, torch.device], int | Tensor],
) -> State:
    """Return `state` plus the clients' values, each divided by the number of all its owners.

    `owners(name, device)` returns that number, as a tensor if it differs between coordinates. It
    includes clients that do not take part in this round. This keeps `state` equal to the mean over
    all owners of something that each client changes only when it takes part, such as control
    variates and dual variables. Values with names that are not in `state` are ignored.
    """
    after = {name: tensor.clone() for name, tensor in state.items()}
    for update in sorted(updates, key=lambda update: update.client):
        into, whole_values, counts = [], [], []
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
                whole_values.append(value)
                counts.append(count)
        if into:
            torch._foreach_add_(into, torch._foreach_div(whole_values, counts))
    return after


def apply(
    state: Mapping[str, Tensor],
    merged: Aggregate,
    parameters: Collection[str],
    step: float = 1.0,
) -> State:
    """Return `state + step * delta`; buffers are not scaled by `step`.

    Coordinates without an owner keep their value bit for bit.
    """
    after = dict(state)
    for (scale, _), names in _groups(merged, parameters, step).items():
        before = [state[name] for name in names]
        deltas = [merged.delta[name] for name in names]
        after.update(zip(names, torch._foreach_add(before, deltas, alpha=scale), strict=True))
    variances = [after[name] for name in merged.delta if name.endswith("running_var")]
    if variances:
        torch._foreach_clamp_min_(variances, 0.0)
    for name, mask in merged.covered.items():
        if mask is not None:
            after[name] = torch.where(mask, after[name], state[name])
    return after


def _groups(
    merged: Aggregate, parameters: Collection[str], step: float
) -> dict[tuple[float, torch.dtype], list[str]]:
    """Group names by the factor on their delta and by dtype, for torch's grouped operations."""
    groups: dict[tuple[float, torch.dtype], list[str]] = {}
    for name, delta in merged.delta.items():
        scale = step if step != 1 and name in parameters else 1
        groups.setdefault((scale, delta.dtype), []).append(name)
    return groups
