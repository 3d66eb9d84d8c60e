"""Rules that take the place of the mean in `merge`, so that few malicious clients move it little.

All of them work on parts. A coordinate is combined over the clients that hold it, its owners:

- `Median`: the coordinate-wise median. Yin et al., Byzantine-Robust Distributed Learning, ICML
  2018.
- `TrimmedMean`: the mean without the largest and the smallest values (same paper).
- `Krum`: multi-Krum. Of the clients of one size, it keeps those whose deltas are closest to the
  others', and averages them. Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
- `CenteredClipping`: the mean of deltas that are clipped around the current estimate. Karimireddy,
  He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021.

Three decisions that the papers leave open:

- **Weights.** Every client counts once. The papers' guarantees are about numbers of clients, and a
  client could otherwise buy influence with the number of examples that it claims.
- **Too few owners.** Two values have no majority, and the median of one value is that value. Below
  the number of clients that a rule needs, `too_few = "keep"` leaves the coordinate as it is in this
  round, and "mean" averages it without protection. `Aggregate.metrics` has the share of such
  coordinates.
- **Integer buffers** (counters) get the median, rounded down.

Nothing here reads a value from the device, so a GPU never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from motley.core.merge import Aggregate, merge
from motley.core.part import Index, Piece, State, is_view, open_grid, select
from motley.core.update import ClientUpdate

#: The treatment of coordinates that too few clients hold.
TooFew: TypeAlias = Literal["keep", "mean"]
#: The name of the number that `Aggregate.metrics` has: the share of the coordinates (with Krum, of
#: the updates) that were held by too few clients.
TOO_FEW = "merge_too_few"


class MergeRule(Protocol):
    """Combines the clients' deltas, as `merge` does."""

    def __call__(self, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the combined delta of every coordinate over its owners."""
        ...


class RobustRule(MergeRule, Protocol):
    """A rule that needs a number of clients to protect."""

    @property
    def too_few(self) -> TooFew:
        """The treatment of coordinates that too few clients hold."""
        ...

    @property
    def needed(self) -> int:
        """The number of clients that must hold a coordinate (with Krum: that must be of a size)."""
        ...


# ---- rules that look at one coordinate at a time


@dataclass(frozen=True)
class Median:
    """The median of every coordinate over its owners, if there are at least three."""

    too_few: TooFew = "keep"

    @property
    def needed(self) -> int:
        """Three: the median of two values is their mean, which one client can move anywhere."""
        return 3

    def __call__(self, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the median delta."""
        return _merge_coordinates(state, updates, _median, self._is_enough, self.too_few)

    def _is_enough(self, counts: Tensor) -> Tensor:
        return counts >= self.needed


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of every coordinate without the `trim` * n largest and as many smallest values.

    The number is rounded up, so that at least one value is dropped on either side, but one or two
    always remain: with three or four owners this is the median. `trim` = 0 is the mean.
    """

    trim: float = 0.2
    too_few: TooFew = "keep"

    @property
    def needed(self) -> int:
        """Three, so that a value remains if one is dropped on either side; one if `trim` is 0."""
        return 3 if self.trim > 0 else 1

    def __call__(self, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the trimmed mean of the deltas."""
        return _merge_coordinates(state, updates, self._mean, self._is_enough, self.too_few)

    def _mean(self, ordered: Tensor, counts: Tensor) -> Tensor:
        # Without the small number, 0.1 * 30 = 3.0000000000000004 would be rounded up to 4.
        dropped = (self.trim * counts.double() - 1e-9).ceil().long()
        dropped = torch.minimum(dropped, (counts - 1) // 2).clamp(min=0)
        positions = _positions(ordered)
        inside = (positions >= dropped) & (positions < counts - dropped)
        total = torch.where(inside, ordered, 0).sum(0)
        return total / (counts - 2 * dropped).clamp(min=1)

    def _is_enough(self, counts: Tensor) -> Tensor:
        return counts >= self.needed


def _median(ordered: Tensor, counts: Tensor) -> Tensor:
    last = len(ordered) - 1
    lower = ((counts - 1) // 2).clamp(0, last).unsqueeze(0)
    upper = (counts // 2).clamp(0, last).unsqueeze(0)
    # Halved before the addition, which could overflow.
    halves = ordered.gather(0, lower) / 2 + ordered.gather(0, upper) / 2
    return halves.squeeze(0)


@dataclass
class _Values:
    """The values of one global name: one row per client, NaN where a client holds nothing."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    #: Whether every client holds the whole tensor.
    whole: bool = True


def _merge_coordinates(
    state: Mapping[str, Tensor],
    updates: Sequence[ClientUpdate],
    combine: Callable[[Tensor, Tensor], Tensor],
    is_enough: Callable[[Tensor], Tensor],
    too_few: TooFew,
) -> Aggregate:
    """Combine every coordinate over its owners.

    `combine` takes values in ascending order along the first dimension, and how many of them there
    are for each coordinate; the rest is NaN. `is_enough` tells for which of these numbers the rule
    protects.
    """
    delta: State = {}
    covered: dict[str, Tensor | None] = {}
    num_held: list[Tensor] = []
    num_too_few: list[Tensor] = []
    for name, values in _values_by_name(state, updates).items():
        stacked = torch.stack(list(values.rows.values()))
        # NaN is sorted to the end. Order does not depend on which client a value comes from.
        ordered = stacked.sort(dim=0).values
        is_held = ~ordered.isnan()
        counts = is_held.sum(0)
        enough = is_enough(counts)
        num_held.append((counts > 0).sum())
        num_too_few.append(((counts > 0) & ~enough).sum())
        combined = combine(ordered, counts)
        usable = enough & (counts > 0)
        if too_few == "mean":
            mean = torch.where(is_held, ordered, 0).sum(0) / counts.clamp(min=1)
            combined = torch.where(enough, combined, mean)
            usable = counts > 0
        combined = torch.where(usable, combined, 0)
        if not state[name].is_floating_point():
            combined = combined.floor()
        delta[name] = combined.to(state[name].dtype)
        # If all hold the whole tensor, whether they are enough is known without the device.
        number = torch.tensor(len(values.rows))
        known = values.whole and (too_few == "mean" or bool(is_enough(number)))
        covered[name] = None if known else usable
    return Aggregate(delta, covered, _share_too_few(num_too_few, num_held))


def _values_by_name(
    state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]
) -> dict[str, _Values]:
    """Return the clients' values of every global name, ordered by client."""
    by_name: dict[str, _Values] = {}
    for update in sorted(updates, key=lambda update: update.client):
        for local, piece in update.part.items():
            values = by_name.setdefault(piece.name, _Values())
            row = values.rows.get(update.client)
            if row is None:
                row = _empty_row(state[piece.name])
                values.rows[update.client] = row
            values.whole = values.whole and piece.index is None
            value = update.delta[local].to(row.dtype)
            if local in update.row_weights:
                # Rows that do not count are not held.
                counts = update.row_weights[local].view(-1, *(1,) * (value.dim() - 1)) > 0
                value = torch.where(counts, value, math.nan)
                values.whole = False
            _write(row, piece.index, value)
    return by_name


def _empty_row(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float64
    return torch.full_like(tensor, math.nan, dtype=dtype)


def _write(row: Tensor, index: Index | None, value: Tensor) -> None:
    if index is None:
        row.copy_(value)
    elif is_view(index):
        row[index] = value
    else:
        row[open_grid(row, index)] = value


def _positions(ordered: Tensor) -> Tensor:
    positions = torch.arange(len(ordered), device=ordered.device)
    return positions.view(-1, *(1,) * (ordered.dim() - 1))


def _share_too_few(
    num_too_few: Sequence[Tensor], num_held: Sequence[Tensor]
) -> dict[str, Tensor | float]:
    if not num_held:
        return {}
    total = torch.stack(list(num_held)).sum().clamp(min=1)
    return {TOO_FEW: torch.stack(list(num_too_few)).sum() / total}


# ---- rules that look at whole deltas


@dataclass(frozen=True)
class Krum:
    """Multi-Krum among the clients of each size: average those closest to their neighbours.

    The score of a client is the sum of its squared distances to the n - f - 2 nearest others, with
    f = `attackers`. The n - f clients with the lowest scores are averaged. Deltas of different
    sizes cannot be compared, so a size needs 2 f + 3 clients of its own.

    parameters: the global names that distances are computed over; buffers are left out.
    """

    parameters: Collection[str]
    attackers: int = 1
    too_few: TooFew = "keep"

    @property
    def needed(self) -> int:
        """The least n with n > 2 f + 2, as Blanchard et al. require it."""
        return 2 * self.attackers + 3

    def __call__(self, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the mean delta of the kept clients, over the owners of each coordinate."""
        groups: dict[tuple[str, object], list[ClientUpdate]] = {}
        for update in sorted(updates, key=lambda update: update.client):
            groups.setdefault((update.size, _part_key(update)), []).append(update)
        kept: list[ClientUpdate] = []
        left_out = 0
        for group in groups.values():
            if len(group) >= self.needed:
                kept.append(self._mean_of_closest(group))
                continue
            left_out += len(group)
            if self.too_few == "mean":
                kept.extend(replace(update, weight=1.0) for update in group)
        merged = merge(state, kept)
        return replace(merged, metrics={TOO_FEW: left_out / len(updates)} if updates else {})

    def _mean_of_closest(self, group: Sequence[ClientUpdate]) -> ClientUpdate:
        """Return one update that stands for the kept clients: their mean, with their number as its
        weight.

        A mask on the device selects them, because the host does not know yet which ones they are.
        """
        number = len(group) - self.attackers
        chosen = self._scores(group).argsort(stable=True)[:number]
        mask = torch.zeros(len(group), dtype=torch.bool, device=chosen.device)
        mask[chosen] = True
        delta: State = {}
        for local, example in group[0].delta.items():
            values = torch.stack([update.delta[local] for update in group])
            if not example.is_floating_point():
                delta[local] = _integer_median(values)
                continue
            selected = mask.view(-1, *(1,) * example.dim())
            # Not a multiplication by zero: a value that is not kept may be infinite.
            delta[local] = torch.where(selected, values, 0).sum(0) / number
        return replace(group[0], delta=delta, weight=float(number))

    def _scores(self, group: Sequence[ClientUpdate]) -> Tensor:
        names = [n for n, piece in group[0].part.items() if piece.name in self.parameters]
        vectors = []
        for update in group:
            vectors.append(torch.cat([update.delta[name].flatten() for name in names]))
        # Not by a matrix product, in which a delta of 1e30 would spoil the other distances too.
        distances = torch.stack([_distances(vector, vectors) for vector in vectors])
        # The first is the distance of a client to itself.
        nearest = distances.sort(dim=1).values[:, 1 : len(group) - self.attackers - 1]
        return nearest.sum(1)


def _distances(vector: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the squared distances of one vector to others, in double precision."""
    return torch.stack([(vector - other).norm(dtype=torch.float64).square() for other in others])


def _part_key(update: ClientUpdate) -> tuple[tuple[str, str], ...]:
    """Return a key that clients with the same part share: name and index of every piece."""
    return tuple((piece.name, _index_key(piece)) for piece in update.part.values())


def _index_key(piece: Piece) -> str:
    if piece.index is None:
        return ""
    keys = []
    for chosen in piece.index:
        keys.append(str(chosen) if isinstance(chosen, slice) else str(chosen.tolist()))
    return "|".join(keys)


@dataclass(frozen=True)
class CenteredClipping:
    """The mean of the deltas, each clipped to a distance of `radius` from the current estimate.

    The estimate v starts at zero, and v <- v + mean of clip(delta_i - v, radius) is repeated
    `iterations` times. A client moves a coordinate by at most the radius per iteration, however few
    hold it.

    radius: the distance, or None for the median over the round's clients, relative to the square
        root of their numbers of parameters: small parts then get a smaller radius. A median needs
        three clients. math.inf gives the mean.
    parameters: global names of parameters. Buffers are clipped on their own, by the median
        distance.
    """

    parameters: Collection[str]
    radius: float | None = None
    iterations: int = 3
    too_few: TooFew = "keep"

    @property
    def needed(self) -> int:
        """Three for a median of the distances, one if the radius is given."""
        return 1 if self.radius is not None else 3

    def __call__(self, state: Mapping[str, Tensor], updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the estimate after the last iteration."""
        updates = sorted(updates, key=lambda update: update.client)
        metrics: dict[str, Tensor | float] = {TOO_FEW: 0.0}
        if len(updates) < self.needed:
            metrics[TOO_FEW] = 1.0
            mean = merge(state, [replace(update, weight=1.0) for update in updates])
            return replace(mean, metrics=metrics) if self.too_few == "mean" else _nothing(metrics)
        integers = _integer_medians(updates)
        updates = [_floating(update) for update in updates]
        merged = merge(state, [replace(update, delta=_zeros(update)) for update in updates])
        for _ in range(self.iterations):
            steps = merge(state, self._clipped(updates, merged.delta))
            after = {name: tensor + steps.delta[name] for name, tensor in merged.delta.items()}
            merged = merged.with_delta(after)
        covered = {**merged.covered, **dict.fromkeys(integers)}
        return Aggregate({**merged.delta, **integers}, covered, metrics)

    def _clipped(self, updates: Sequence[ClientUpdate], center: State) -> list[ClientUpdate]:
        """Return the updates with their clipped differences from the center as deltas."""
        differences: list[State] = []
        for update in updates:
            around = {}
            for local, piece in update.part.items():
                around[local] = update.delta[local] - select(center[piece.name], piece.index)
            differences.append(around)
        # Parameters and buffers are clipped apart, because they differ in scale.
        parameters = [self._names(update, of_parameters=True) for update in updates]
        _clip_differences(differences, parameters, self.radius)
        if self.radius != math.inf:  # which asks for the mean: nothing is clipped
            buffers = [self._names(update, of_parameters=False) for update in updates]
            _clip_differences(differences, buffers, None)
        clipped = []
        for update, around in zip(updates, differences, strict=True):
            clipped.append(replace(update, delta=around, weight=1.0))
        return clipped

    def _names(self, update: ClientUpdate, of_parameters: bool) -> list[str]:
        """Return the names of an update's parameters, or those of its buffers."""
        names = []
        for local, piece in update.part.items():
            if (piece.name in self.parameters) == of_parameters:
                names.append(local)
        return names


def _clip_differences(
    differences: Sequence[State], groups: Sequence[list[str]], radius: float | None
) -> None:
    """Scale the tensors of each client that `groups` names down to the radius, all by one factor.

    The scaled tensors replace those in `differences`. Without a radius, it is the median distance
    of the clients.
    """
    # Some clients may have none of these tensors.
    holders = [number for number, names in enumerate(groups) if names]
    if not holders:
        return
    norms, roots = [], []
    for number in holders:
        tensors = [differences[number][name] for name in groups[number]]
        norms.append(total_norm(tensors))
        roots.append(math.sqrt(sum(tensor.numel() for tensor in tensors)))
    if radius is None:
        # The median of each client's distance per coordinate (root mean square).
        relative = torch.stack([norm / root for norm, root in zip(norms, roots, strict=True)])
        typical = relative.nanmedian()
        limits = [typical * root for root in roots]
    else:
        limits = [norms[0].new_tensor(radius)] * len(norms)
    for number, norm, limit in zip(holders, norms, limits, strict=True):
        # A norm of zero is within every radius.
        factor = (limit / norm.clamp(min=1e-300)).clamp(max=1.0)
        for name in groups[number]:
            tensor = differences[number][name]
            differences[number][name] = tensor * factor.to(tensor.dtype)


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together in double precision, in which no fp32 values overflow."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return torch.stack(norms).norm()


def _floating(update: ClientUpdate) -> ClientUpdate:
    """Return an update without its integer tensors."""
    names = [name for name, tensor in update.delta.items() if tensor.is_floating_point()]
    return replace(
        update,
        delta={name: update.delta[name] for name in names},
        part={name: update.part[name] for name in names},
    )


def _zeros(update: ClientUpdate) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in update.delta.items()}


def _integer_medians(updates: Sequence[ClientUpdate]) -> State:
    """Return the medians of integer tensors, by global name."""
    values: dict[str, list[Tensor]] = {}
    for update in updates:
        for local, piece in update.part.items():
            if not update.delta[local].is_floating_point():
                values.setdefault(piece.name, []).append(update.delta[local])
    return {name: _integer_median(torch.stack(tensors)) for name, tensors in values.items()}


def _integer_median(values: Tensor) -> Tensor:
    """Return the lower median over the first dimension, which is an integer."""
    return values.sort(dim=0).values[(len(values) - 1) // 2]


def _nothing(metrics: Mapping[str, Tensor | float]) -> Aggregate:
    return Aggregate({}, {}, metrics)
