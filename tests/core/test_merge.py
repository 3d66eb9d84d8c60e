"""`take` and `merge` against a slow, obvious reference, over parts of every kind."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motley.core.merge import Aggregate, add_shares, apply, merge
from motley.core.part import Part, Piece, State, take
from motley.core.update import ClientUpdate

SHAPES = {"stem": (4, 2), "deep.weight": (3, 4, 2), "deep.running_var": (4,), "scale": (5,)}
COUNT = "deep.num_batches_tracked"
SIZES = ("small", "large")


def global_state(seed: int) -> State:
    numbers = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=numbers) for name, shape in SHAPES.items()}
    state["deep.running_var"] = state["deep.running_var"].abs()
    state[COUNT] = torch.tensor(7)
    for size in SIZES:
        state[f"{size}/own"] = torch.randn(3, generator=numbers)
    return state


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice | Tensor, ...] | None:
    """Everything, leading channels, a range, or any distinct channels in any order, a dimension at a time."""
    if draw(st.booleans()):
        return None
    chosen: list[slice | Tensor] = []
    for length in shape:
        kind = draw(st.sampled_from(["all", "leading", "range", "vector"]))
        if kind == "all":
            chosen.append(slice(None))
        elif kind == "leading":
            chosen.append(slice(0, draw(st.integers(1, length))))
        elif kind == "range":
            first = draw(st.integers(0, length - 1))
            chosen.append(slice(first, draw(st.integers(first + 1, length))))
        else:
            some = draw(st.lists(st.integers(0, length - 1), min_size=1, unique=True))
            chosen.append(torch.tensor(some))
    return tuple(chosen)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """A part: some of the layers (depth), some of their coordinates (width), and a tensor of the size alone."""
    held = draw(st.sets(st.sampled_from(sorted(SHAPES)), min_size=0))
    part = {f"local.{name}": Piece(name, draw(indices(SHAPES[name]))) for name in sorted(held)}
    part["own"] = Piece(f"{draw(st.sampled_from(SIZES))}/own")
    if draw(st.booleans()):
        part["count"] = Piece(COUNT)
    return part


def positions(shape: tuple[int, ...], index: tuple[slice | Tensor, ...] | None) -> list[list[int]]:
    """The chosen positions of each dimension, as plain lists."""
    index = index or (slice(None),) * len(shape)
    return [
        list(range(n))[i] if isinstance(i, slice) else i.tolist()
        for n, i in zip(shape, index, strict=True)
    ]


def slow_take(state: State, part: Part) -> dict[str, dict[tuple[int, ...], float]]:
    """Every client coordinate with its value, one number at a time."""
    taken = {}
    for local, piece in part.items():
        tensor = state[piece.name]
        axes = positions(tuple(tensor.shape), piece.index)
        taken[local] = {
            tuple(place): tensor[tuple(axis[k] for axis, k in zip(axes, place, strict=True))].item()
            for place in itertools.product(*(range(len(axis)) for axis in axes))
        }
    return taken


def slow_merge(
    state: State, updates: list[ClientUpdate]
) -> dict[str, dict[tuple[int, ...], float]]:
    """The weighted mean of every coordinate that somebody holds, one number at a time, in double precision."""
    sums: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}
    for update in updates:
        for local, piece in update.part.items():
            axes = positions(tuple(state[piece.name].shape), piece.index)
            for place in itertools.product(*(range(len(axis)) for axis in axes)):
                there = tuple(axis[k] for axis, k in zip(axes, place, strict=True))
                held = sums.setdefault(piece.name, {})
                own = update.weight
                if local in update.row_weights:
                    own *= update.row_weights[local][place[0]].item()
                if own:
                    total, weight = held.get(there, (0.0, 0.0))
                    held[there] = total + own * update.delta[local][place].item(), weight + own
    return {
        name: {at: total / weight for at, (total, weight) in held.items()}
        for name, held in sums.items()
    }


def changes(state: State, part: Part, seed: int) -> State:
    numbers = torch.Generator().manual_seed(seed)
    return {
        local: torch.randint(-5, 6, tensor.shape, generator=numbers)
        if not tensor.is_floating_point()
        else torch.randn(tensor.shape, generator=numbers)
        for local, tensor in take(state, part).items()
    }


def counting(length: int) -> st.SearchStrategy[Tensor]:
    """Which rows of a tensor count."""
    return st.lists(st.sampled_from([0.0, 1.0]), min_size=length, max_size=length).map(torch.tensor)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[State, list[ClientUpdate]]:
    state = global_state(draw(st.integers(0, 1000)))
    updates = []
    for client, part in enumerate(draw(st.lists(parts(), max_size=5))):
        weight = draw(st.sampled_from([1.0, 0.5, 37.0, 512.0]))
        change = changes(state, part, draw(st.integers(0, 1000)))
        some = draw(st.sets(st.sampled_from(sorted(part.keys() - {"count"}))))
        rows = {local: draw(counting(len(change[local]))) for local in sorted(some)}
        updates.append(
            ClientUpdate(client=client, part=part, delta=change, weight=weight, row_weights=rows)
        )
    return state, updates


@given(st.integers(0, 100), parts())
@settings(max_examples=150, deadline=None)
def test_take_equals_the_reference(seed: int, part: Part) -> None:
    state = global_state(seed)
    taken = take(state, part)
    for local, values in slow_take(state, part).items():
        for place, value in values.items():
            assert taken[local][place].item() == value
        assert taken[local].numel() == len(values)


@given(rounds())
@settings(max_examples=150, deadline=None)
def test_merge_equals_the_reference(played: tuple[State, list[ClientUpdate]]) -> None:
    state, updates = played
    merged = merge(state, updates)
    expected = slow_merge(state, updates)
    assert merged.delta.keys() == expected.keys()
    for name, held in expected.items():
        mask = merged.covered[name]
        for place in itertools.product(*(range(n) for n in state[name].shape)):
            assert (mask is None or bool(mask[place])) == (place in held)
            mean = held.get(place, 0.0)
            value = merged.delta[name][place].item()
            if state[name].is_floating_point():
                assert value == pytest.approx(mean, rel=1e-5, abs=1e-5)
            else:
                assert value == int(mean)


@given(rounds())
@settings(max_examples=150, deadline=None)
def test_apply_adds_where_somebody_held_and_nowhere_else(
    played: tuple[State, list[ClientUpdate]],
) -> None:
    state, updates = played
    state["scale"][0] = -0.0
    after = apply(state, merge(state, updates), SHAPES, step=0.5)
    expected = slow_merge(state, updates)
    for name, tensor in state.items():
        assert after[name].dtype == tensor.dtype
        for place in itertools.product(*(range(n) for n in tensor.shape)):
            before, value = tensor[place], after[name][place]
            if place not in expected.get(name, {}):
                assert (
                    before.reshape(1).view(torch.uint8).tolist()
                    == value.reshape(1).view(torch.uint8).tolist()
                )
                continue
            change = expected[name][place] * (0.5 if name in SHAPES else 1.0)
            target = before.item() + (change if tensor.is_floating_point() else int(change))
            if name.endswith("running_var"):
                target = max(target, 0.0)
            assert value.item() == pytest.approx(target, rel=1e-4, abs=1e-4)


@given(rounds(), st.randoms())
@settings(max_examples=50, deadline=None)
def test_arrival_order_does_not_matter(
    played: tuple[State, list[ClientUpdate]], random: object
) -> None:
    state, updates = played
    shuffled = list(updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = merge(state, updates), merge(state, shuffled)
    assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta)


def test_three_numbers_by_hand() -> None:
    """Two clients of weights 1 and 3 share the first two channels; the third channel belongs to the second alone."""
    state = {"w": torch.tensor([10.0, 20.0, 30.0, 40.0])}
    narrow = {"w": Piece("w", (slice(0, 2),))}
    wide = {"w": Piece("w", (slice(0, 3),))}
    updates = [
        ClientUpdate(client=0, part=narrow, delta={"w": torch.tensor([4.0, 8.0])}, weight=1.0),
        ClientUpdate(client=1, part=wide, delta={"w": torch.tensor([0.0, 4.0, 5.0])}, weight=3.0),
    ]
    merged = merge(state, updates)
    assert merged.delta["w"].tolist() == [1.0, 5.0, 5.0, 0.0]  # (4 + 0)/4, (8 + 12)/4, 15/3, nobody
    assert apply(state, merged, {"w"})["w"].tolist() == [11.0, 25.0, 35.0, 40.0]


def test_a_whole_and_a_sliced_owner_share_a_tensor() -> None:
    state = {"w": torch.zeros(3)}
    updates = [
        ClientUpdate(client=0, part={"w": Piece("w")}, delta={"w": torch.tensor([2.0, 2.0, 2.0])}),
        ClientUpdate(
            client=1,
            part={"w": Piece("w", (torch.tensor([2, 0]),))},
            delta={"w": torch.tensor([4.0, 6.0])},
        ),
    ]
    merged = merge(state, updates)
    assert merged.delta["w"].tolist() == [4.0, 2.0, 3.0]
    assert merged.covered["w"] is None


def test_running_variance_stays_above_zero_and_counters_stay_whole() -> None:
    state = {"bn.running_var": torch.tensor([0.5]), "bn.num_batches_tracked": torch.tensor(3)}
    part = {name: Piece(name) for name in state}
    updates = [
        ClientUpdate(
            client=c,
            part=part,
            delta={
                "bn.running_var": torch.tensor([-0.9]),
                "bn.num_batches_tracked": torch.tensor(5 + 2 * c),
            },
        )
        for c in range(2)
    ]
    after = apply(state, merge(state, updates), set())
    assert after["bn.running_var"].item() == 0.0
    assert after["bn.num_batches_tracked"].item() == 9
    assert after["bn.num_batches_tracked"].dtype == torch.int64


def test_the_step_is_for_parameters_only() -> None:
    state = {"w": torch.tensor([1.0]), "bn.running_mean": torch.tensor([1.0])}
    merged = Aggregate(
        {"w": torch.tensor([1.0]), "bn.running_mean": torch.tensor([1.0])}, dict.fromkeys(state)
    )
    after = apply(state, merged, {"w"}, step=0.2)
    assert after["w"].item() == pytest.approx(1.2)
    assert after["bn.running_mean"].item() == 2.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="client 3"):
        update = ClientUpdate(
            client=3, part={"w": Piece("w")}, delta={"w": torch.ones(1)}, weight=weight
        )
        merge({"w": torch.zeros(1)}, [update])


def test_shares_are_over_all_owners_and_only_of_names_that_are_kept() -> None:
    kept = {"whole": torch.ones(2), "pieces": torch.zeros(3), "absent": torch.ones(1)}
    whole = {"w": Piece("whole"), "p": Piece("pieces", (slice(0, 2),)), "b": Piece("buffer")}
    other = {"w": Piece("whole"), "p": Piece("pieces", (torch.tensor([2, 0]),))}
    updates = [
        ClientUpdate(
            client=1,
            part=other,
            delta={"w": torch.tensor([4.0, 0.0]), "p": torch.tensor([1.0, 2.0])},
        ),
        ClientUpdate(
            client=0,
            part=whole,
            delta={
                "w": torch.tensor([8.0, 4.0]),
                "p": torch.tensor([3.0, 6.0]),
                "b": torch.ones(1),
            },
        ),
    ]
    owners = {"whole": 4, "pieces": 10}
    after = add_shares(kept, updates, lambda update: update.delta, lambda name, _: owners[name])
    assert {name: tensor.tolist() for name, tensor in after.items()} == {
        "whole": [4.0, 2.0],
        "pieces": pytest.approx([0.5, 0.6, 0.1]),
        "absent": [1.0],
    }
    assert kept["whole"].tolist() == [1.0, 1.0], "nothing is changed in place"
