"""The robust rules against slow references in numpy, over parts of every kind, and under attack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motley.core.merge import Aggregate, merge
from motley.core.part import Piece, State, take
from motley.core.robust import TOO_FEW, CenteredClipping, Krum, Median, MergeRule, TrimmedMean
from motley.core.update import ClientUpdate
from tests.core.test_merge import COUNT, SHAPES, global_state, parts, positions

#: All floating tensors but the statistics.
PARAMETERS = ("stem", "deep.weight", "scale", "small/own", "large/own")


@st.composite
def rounds(draw: st.DrawFn) -> tuple[State, list[ClientUpdate]]:
    """A global state, and the updates of up to nine clients with parts of three kinds."""
    state = global_state(draw(st.integers(0, 99)))
    kinds = [draw(parts()) for _ in range(3)]
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    updates = []
    for client in range(draw(st.integers(1, 9))):
        size = draw(st.integers(0, 2))
        part = kinds[size]
        delta = {}
        for local, tensor in take(state, part).items():
            if tensor.is_floating_point():
                delta[local] = torch.randn(tensor.shape, generator=numbers)
            else:
                delta[local] = torch.randint(-5, 50, tensor.shape, generator=numbers)
        updates.append(ClientUpdate(client=client, delta=delta, part=part, size=str(size)))
    return state, updates


def held_values(state: State, updates: Sequence[ClientUpdate], name: str) -> np.ndarray:
    """Return the values of one name, one list per coordinate, found one number at a time."""
    held = np.empty(tuple(state[name].shape), dtype=object)
    for place in np.ndindex(held.shape):
        held[place] = []
    for update in updates:
        for local, piece in update.part.items():
            if piece.name != name:
                continue
            axes = positions(tuple(state[name].shape), piece.index)
            for place in np.ndindex(tuple(update.delta[local].shape)):
                where = tuple(axis[k] for axis, k in zip(axes, place, strict=True))
                held[where].append(update.delta[local][place].item())
    return held


def slow_trimmed(values: list[float], trim: float) -> float | None:
    if trim and len(values) < 3:
        return None
    dropped = min(math.ceil(trim * len(values) - 1e-9), (len(values) - 1) // 2)
    return float(np.mean(sorted(values)[dropped : len(values) - dropped]))


def slow_median(values: list[float]) -> float | None:
    return float(np.median(values)) if len(values) >= 3 else None


def check_against(
    state: State,
    updates: Sequence[ClientUpdate],
    merged: Aggregate,
    slow: Callable[[list[float]], float | None],
    too_few: str,
) -> None:
    """Compare every coordinate with the slow rule; those that too few hold have no value."""
    num_held = num_too_few = 0
    for name in state:
        held = held_values(state, updates, name)
        mask = merged.covered.get(name)
        for place in np.ndindex(held.shape):
            values = held[place]
            if not values:
                assert name not in merged.delta or (mask is not None and not mask[place])
                continue
            num_held += 1
            expected = slow(values)
            if expected is None:
                num_too_few += 1
                if too_few == "keep":
                    assert mask is not None and not mask[place]
                    continue
                expected = float(np.mean(values))
            assert mask is None or mask[place]
            if name == COUNT:
                expected = math.floor(expected)
            assert merged.delta[name][place].item() == pytest.approx(expected, abs=1e-5)
    assert float(merged.metrics[TOO_FEW]) == pytest.approx(num_too_few / max(num_held, 1))


@settings(max_examples=40, deadline=None)
@given(rounds(), st.sampled_from([0.0, 0.1, 0.2, 0.4]), st.sampled_from(["keep", "mean"]))
def test_trimmed_mean_is_that_of_every_coordinate(
    case: tuple[State, list[ClientUpdate]], trim: float, too_few: str
) -> None:
    state, updates = case
    merged = TrimmedMean(trim, too_few)(state, updates)  # type: ignore[arg-type]
    check_against(state, updates, merged, lambda values: slow_trimmed(values, trim), too_few)


@settings(max_examples=40, deadline=None)
@given(rounds(), st.sampled_from(["keep", "mean"]))
def test_median_is_that_of_every_coordinate(
    case: tuple[State, list[ClientUpdate]], too_few: str
) -> None:
    state, updates = case
    check_against(state, updates, Median(too_few)(state, updates), slow_median, too_few)  # type: ignore[arg-type]


def flat(update: ClientUpdate) -> np.ndarray:
    """Return the parameters of a delta as one vector."""
    names = [n for n, piece in update.part.items() if piece.name in PARAMETERS]
    return np.concatenate([update.delta[n].double().flatten().numpy() for n in names])


def slow_krum(updates: Sequence[ClientUpdate], attackers: int) -> list[int]:
    """Return the clients that multi-Krum keeps, of clients with one part."""
    scores = []
    for one in updates:
        others = [other for other in updates if other is not one]
        distances = sorted(((flat(one) - flat(other)) ** 2).sum() for other in others)
        scores.append(sum(distances[: len(updates) - attackers - 2]))
    order = np.argsort(scores, kind="stable")[: len(updates) - attackers]
    return [updates[number].client for number in order]


@settings(max_examples=40, deadline=None)
@given(rounds(), st.integers(0, 2))
def test_krum_averages_the_clients_of_a_size_that_the_slow_rule_keeps(
    case: tuple[State, list[ClientUpdate]], attackers: int
) -> None:
    state, updates = case
    kept: list[ClientUpdate] = []
    left_out = 0
    for size in ("0", "1", "2"):
        group = [update for update in updates if update.size == size]
        if len(group) < 2 * attackers + 3:
            left_out += len(group)
            continue
        clients = slow_krum(group, attackers)
        kept += [update for update in group if update.client in clients]
    expected = merge(state, kept)
    merged = Krum(PARAMETERS, attackers)(state, updates)
    assert merged.delta.keys() == expected.delta.keys()
    for name in set(merged.delta) - {COUNT}:
        torch.testing.assert_close(merged.delta[name], expected.delta[name])
    assert merged.metrics[TOO_FEW] == left_out / len(updates)


def slow_clipping(
    state: State, updates: Sequence[ClientUpdate], radius: float | None, iterations: int
) -> dict[str, np.ndarray]:
    """Return centered clipping of floating tensors, one number at a time."""
    names = [name for name in state if name != COUNT]
    center = {name: np.zeros(tuple(state[name].shape)) for name in names}
    for _ in range(iterations):
        differences: list[dict[str, np.ndarray]] = []
        for update in updates:
            own = {}
            for local, piece in update.part.items():
                if piece.name == COUNT:
                    continue
                axes = positions(tuple(state[piece.name].shape), piece.index)
                around = center[piece.name][np.ix_(*axes)]
                own[local] = update.delta[local].double().numpy() - around
            differences.append(own)
        for group in (True, False):
            norms, roots = {}, {}
            for number, update in enumerate(updates):
                chosen = [
                    differences[number][local].ravel()
                    for local, piece in update.part.items()
                    if piece.name != COUNT and (piece.name in PARAMETERS) == group
                ]
                if chosen:
                    vector = np.concatenate(chosen)
                    norms[number] = np.sqrt((vector**2).sum())
                    roots[number] = math.sqrt(vector.size)
            relative = sorted(norms[number] / roots[number] for number in norms)
            for number in norms:
                limit = radius
                if radius is None or not group:
                    limit = relative[(len(relative) - 1) // 2] * roots[number]
                factor = min(1.0, limit / max(norms[number], 1e-300))
                for local, piece in updates[number].part.items():
                    if piece.name != COUNT and (piece.name in PARAMETERS) == group:
                        differences[number][local] = differences[number][local] * factor
        changes = []
        for update, own in zip(updates, differences, strict=True):
            delta = {local: torch.from_numpy(value) for local, value in own.items()}
            part = {local: update.part[local] for local in own}
            changes.append(replace(update, delta=delta, part=part))
        for name in names:
            held = held_values(state, changes, name)
            for place in np.ndindex(held.shape):
                if held[place]:
                    center[name][place] += np.mean(held[place])
    return center


@settings(max_examples=25, deadline=None)
@given(rounds(), st.sampled_from([None, 0.5, 3.0]), st.integers(1, 3))
def test_centered_clipping_is_the_slow_one(
    case: tuple[State, list[ClientUpdate]], radius: float | None, iterations: int
) -> None:
    state, updates = case
    merged = CenteredClipping(PARAMETERS, radius, iterations)(state, updates)
    if radius is None and len(updates) < 3:
        assert merged.delta == {}
        assert merged.metrics[TOO_FEW] == 1.0
        return
    expected = slow_clipping(state, updates, radius, iterations)
    for name in set(merged.delta) - {COUNT}:
        np.testing.assert_allclose(merged.delta[name], expected[name], atol=1e-4)


RULES: dict[str, MergeRule] = {
    "trimmed-mean": TrimmedMean(0.2),
    "median": Median(),
    "krum": Krum(PARAMETERS, 1),
    "centered-clipping": CenteredClipping(PARAMETERS),
}


@settings(max_examples=15, deadline=None)
@given(rounds(), st.sampled_from(sorted(RULES)), st.randoms())
def test_the_order_of_clients_does_not_matter(
    case: tuple[State, list[ClientUpdate]], rule: str, random: object
) -> None:
    state, updates = case
    shuffled = list(updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = RULES[rule](state, updates), RULES[rule](state, shuffled)
    assert one.delta.keys() == other.delta.keys()
    for name, tensor in one.delta.items():
        assert torch.equal(tensor, other.delta[name])


@settings(max_examples=25, deadline=None)
@given(rounds())
def test_rules_that_drop_nothing_are_the_mean(case: tuple[State, list[ClientUpdate]]) -> None:
    state, updates = case
    expected = merge(state, updates)
    unclipped = CenteredClipping(PARAMETERS, math.inf, 1)
    for rule in (TrimmedMean(0.0), unclipped):
        merged = rule(state, updates)
        for name in set(expected.delta) - {COUNT}:
            torch.testing.assert_close(merged.delta[name], expected.delta[name])
            mask, other = expected.covered[name], merged.covered[name]
            if mask is not None and other is not None:
                assert torch.equal(mask, other)


def equal_clients(values: Sequence[float]) -> tuple[State, list[ClientUpdate]]:
    """Return clients with one number each, of one tensor that all hold."""
    part = {"w": Piece("w")}
    updates = [
        ClientUpdate(client=client, delta={"w": torch.tensor([value])}, part=part, size="s")
        for client, value in enumerate(values)
    ]
    return {"w": torch.zeros(1)}, updates


def merged_value(rule: MergeRule, values: Sequence[float]) -> float:
    state, updates = equal_clients(values)
    return float(rule(state, updates).delta["w"])


def test_one_client_alone_is_the_mean_or_nothing() -> None:
    assert merged_value(Median("mean"), [3.0]) == 3.0
    assert merged_value(TrimmedMean(0.2, "mean"), [3.0]) == 3.0
    assert merged_value(Krum(["w"], 1, "mean"), [3.0]) == 3.0
    state, updates = equal_clients([3.0])
    kept = Median()(state, updates)
    assert kept.covered["w"] is not None and not kept.covered["w"].any()
    assert Krum(["w"], 1)(state, updates).delta == {}


def test_by_hand() -> None:
    assert merged_value(Median(), [1.0, 5.0, 2.0, 100.0]) == 3.5
    # 20 % of five is one value on either side.
    assert merged_value(TrimmedMean(0.2), [1.0, 2.0, 3.0, 4.0, 100.0]) == 3.0
    # 20 % of six is rounded up to two: (3 + 4) / 2.
    assert merged_value(TrimmedMean(0.2), [1.0, 2.0, 3.0, 4.0, 5.0, 100.0]) == 3.5
    # With f = 1, scores are sums over two neighbours. The outlier is not among the four kept.
    assert merged_value(Krum(["w"], 1), [0.0, 1.0, 2.0, 3.0, 50.0]) == 1.5
    # From zero with radius 1: (0.5 + 1 - 1) / 3.
    assert merged_value(CenteredClipping(["w"], 1.0, 1), [0.5, 4.0, -9.0]) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (Median(), 3),
        (TrimmedMean(0.0), 1),
        (TrimmedMean(0.2), 3),
        (TrimmedMean(0.4), 3),
        (TrimmedMean(0.45), 3),
        (Krum((), 1), 5),
        (Krum((), 2), 7),
        (CenteredClipping((), None), 3),
        (CenteredClipping((), 1.0), 1),
    ],
)
def test_clients_that_a_rule_needs(rule: Median | TrimmedMean | Krum, needed: int) -> None:
    assert rule.needed == needed


@pytest.mark.parametrize("value", [1e30, -1e38])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_one_attacker_has_no_effect(rule: str, value: float) -> None:
    part = {"stem": Piece("stem"), "var": Piece("deep.running_var", (slice(0, 2),))}
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    numbers = torch.Generator().manual_seed(0)

    def update(client: int, make: Callable[[Tensor], Tensor]) -> ClientUpdate:
        delta = {local: make(tensor) for local, tensor in take(state, part).items()}
        return ClientUpdate(client=client, delta=delta, part=part, size="s")

    honest = [
        update(client, lambda t: torch.randn(t.shape, generator=numbers)) for client in range(6)
    ]
    attacked = [*honest, update(9, lambda t: torch.full_like(t, value))]
    merged = RULES[rule](state, attacked)
    for name in ("stem", "deep.running_var"):
        values = torch.stack(
            [one.delta[local] for one in honest for local in part if part[local].name == name]
        )
        found = take(merged.delta, {"x": Piece(name, part["var"].index if "var" in name else None)})
        # Every coordinate stays within the honest clients' values.
        assert (found["x"] >= values.amin(0)).all()
        assert (found["x"] <= values.amax(0)).all()
