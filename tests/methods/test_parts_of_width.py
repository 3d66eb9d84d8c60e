"""Methods over parts that are pieces of tensors: what every method keeps, and HeteroFL's own measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from motley.client.clients import COLLECTION_BATCH_FACTOR
from motley.core.merge import add_shares
from motley.core.part import State, add_at, select, take
from motley.federation import Federation
from motley.methods import METHODS, FederationInfo
from motley.models import ImageShape
from motley.runs.checkpoint import load_checkpoint, save_checkpoint
from motley.server.state import ServerState
from tests.conftest import tiny_config
from tests.methods.test_contract import (
    FAST,
    WITH_A_SPLIT,
    NoValueIsRead,
    Watched,
    everything,
    played,
)
from tests.methods.turns import sections_of

WIDTH = ("split.name=width", "split.rates=[1,0.5,0.25]", "model.sizes=['resnet14']")
GRID = ("split.cuts=[2,3,6]", "split.rates=[0.5,0.75,1]", "model.sizes=['resnet14']")
INCO = ("server.inco.variant=official",)
RULES = ("leading", "rolling", "random")
OTHERS = ("fedin", "fedimpro", "fedgen", "ccvr", "spherefed", "feddf", "fedet", "nested")
#: Methods whose clients keep models of their own: there is no delta and no global model.
OWN_MODELS = {e.name for e in METHODS if not e.item.requirements.exchanges_weights}
NOT_HERE = {*WITH_A_SPLIT, *OWN_MODELS, *(e.name for e in METHODS if e.name.startswith(OTHERS))}
"""Methods with a split of their own, those whose server state has names that are no parameters', and those that need
whole heads, whole blocks or public images.
"""
CASES = {
    **{
        f"{e.name}-leading": (f"method.name={e.name}", *WIDTH)
        for e in METHODS
        if e.name not in NOT_HERE
    },
    "fedavg-rolling": (*WIDTH, "split.channels=rolling"),
    "fedavg-random": (*WIDTH, "split.channels=random"),
    "fednova-random": (*WIDTH, "split.channels=random", "method.name=fednova"),
    "heterofl-dynamic": (
        *WIDTH,
        "method.name=heterofl",
        "federation.size_assignment=dynamic",
        "evaluation.every=1",
    ),
    "HeteroFL": ("method.name=HeteroFL", *WIDTH[1:], "evaluation.every=1"),
    "FedRolex": ("method.name=FedRolex", *WIDTH[1:], "split.normalization_statistics=batch"),
    "FjORD": ("method.name=FjORD", *WIDTH[1:]),
    "ScaleFL": (
        "method.name=ScaleFL",
        *GRID,
        "split.normalization_statistics=batch",
        "method.begin=0",
    ),
    "DepthFL": ("method.name=DepthFL", *GRID, "method.ramp=2"),
    "InclusiveFL": ("method.name=InclusiveFL",),
    "FederatedDropout": ("method.name=FederatedDropout", *WIDTH[1:], "server.optimizer.name=adam"),
}

SMALLEST_FIRST = ("ScaleFL", "DepthFL", "InclusiveFL")


def federation_of(*overrides: str, folder: Path | None = None) -> Federation:
    shared = [
        o for o in FAST if not any(o.startswith(f"{p.partition('=')[0]}=") for p in overrides)
    ]
    return Federation(tiny_config(*shared, *overrides), client_state_folder=folder)


@pytest.mark.parametrize("case", CASES)
def test_slots_debug_and_a_resumed_run_end_alike(case: str, tmp_path: Path) -> None:
    """With InCo on top, over pieces."""
    overrides = (*CASES[case], *INCO)
    first = federation_of(*overrides, folder=tmp_path / "clients")
    half = played(first, first.initial_state(), 1)
    first.engine.save_client_states(half.client_state_rounds)
    save_checkpoint(tmp_path / "checkpoints", half, keep=1)
    whole = everything(first, played(first, half, 1))

    debug = federation_of(*overrides, "engine.name=debug")
    assert everything(debug, played(debug, debug.initial_state(), 2)) == whole

    resumed = federation_of(*overrides, "engine.slots=2", folder=tmp_path / "clients")
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert (
        saved is not None
        and everything(resumed, played(resumed, resumed.to_device(saved), 1)) == whole
    )


def covered(federation: Federation, clients: list[int], round_number: int) -> State:
    """Return which coordinates of which names some client held in a round."""
    held: State = {}
    for client in clients:
        size = federation.size_of(client, round_number)
        for piece in federation.split.part(size, round_number, client).values():
            counts = held.setdefault(
                piece.name, torch.zeros(federation.split.meta_state[piece.name].shape)
            )
            add_at(counts, piece.index, 1.0)
    return {name: counts > 0 for name, counts in held.items()}


@pytest.mark.parametrize("inco", [(), INCO], ids=["plain", "inco"])
@pytest.mark.parametrize("case", [case for case in CASES if "dynamic" not in case])
def test_coordinates_nobody_held_stay_bit_for_bit(case: str, inco: tuple[str, ...]) -> None:
    """The second round has narrow clients only: whatever InCo, an optimiser or a method keeps, nothing leaks."""
    still = ("evaluation.every=3",) if "FL" in case else ()
    federation = federation_of(*CASES[case], *inco, *still, "federation.clients_per_round=2")
    narrow = [0, 1] if case in SMALLEST_FIRST else [4, 5]
    federation.sample = lambda number, attempt=0: [2, 3] if number == 1 else narrow
    before, _ = federation.run_round(federation.initial_state())
    after, record = federation.run_round(before)
    assert not record.refused
    held = covered(federation, narrow, 2)
    partly = 0
    for section, new in sections_of(after).items():
        old = sections_of(before)[section]
        for name, tensor in new.items():
            mask = held.get(name.removeprefix("first/").removeprefix("second/"))
            if mask is None:
                assert torch.equal(tensor, old[name]), (section, name)
                continue
            partly += bool((~mask).any())
            assert torch.equal(tensor[~mask], old[name][~mask]), (section, name)
            if section == "state" and tensor.dim() == 4:
                assert not torch.equal(tensor[mask], old[name][mask]), name
    assert partly > 10 or case == "InclusiveFL"


@pytest.mark.parametrize("rule", RULES)
def test_inco_pairs_kernels_that_both_layers_had_an_owner_of(rule: str) -> None:
    """A kernel of the deep layer is refined where the shallow layer's kernel was covered as well, and only there."""
    narrow = (
        "model.sizes=['resnet18']",
        *WIDTH[:1],
        "split.rates=[1,0.5]",
        f"split.channels={rule}",
    )
    ends = []
    for more in ((), INCO):
        federation = federation_of(
            *narrow, *more, "model.resnet.width=0.125", "federation.clients_per_round=1"
        )
        federation.sample = lambda number, attempt=0: [5]
        ends.append(federation.run_round(federation.initial_state())[0].state)
    held = covered(federation, [5], 1)
    refined = 0
    for source, target, _ in federation.split.cross_layers:
        both = held[source] & held[target]
        assert torch.equal(ends[0][target][~both], ends[1][target][~both])
        refined += int((ends[0][target] != ends[1][target]).sum())
    assert refined > 100


# ---- equalities


def after(rounds: int, *overrides: str) -> tuple[Federation, ServerState]:
    federation = federation_of(*overrides)
    return federation, played(federation, federation.initial_state(), rounds)


PLAIN = ("method.masked=false", "method.classifier_rows=all", "method.statistics=running")


@pytest.mark.parametrize(
    "overrides",
    [
        *[(f"split.channels={rule}",) for rule in RULES],
        ("split.scaler=true",),
        ("method.name=heterofl", *PLAIN),
        ("method.name=heterofl", "method.statistics=running", "data.partition.name=iid"),
    ],
    ids=lambda overrides: overrides[-1],
)
def test_full_width_for_everybody_is_fedavg_bit_for_bit(overrides: tuple[str, ...]) -> None:
    """With all labels at every client, masks and rows by label change nothing either."""
    data = [o for o in overrides if o.startswith("data.")]
    _, plain = after(2, "split.name=homogeneous", "model.sizes=['resnet14']", *data)
    _, wide = after(
        2, "split.name=width", "split.rates=[1]", "model.sizes=['resnet14']", *overrides
    )
    assert plain.state.keys() == wide.state.keys()
    assert all(torch.equal(wide.state[name], tensor) for name, tensor in plain.state.items())


def test_the_first_round_of_fedrolex_is_heterofls() -> None:
    ends = [after(2, *WIDTH, f"split.channels={rule}")[1].state for rule in ("leading", "rolling")]
    starts = [
        after(1, *WIDTH, f"split.channels={rule}")[1].state for rule in ("leading", "rolling")
    ]
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    assert not all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# ---- owners of a coordinate


def test_owners_are_counted_by_coordinate_where_parts_are_pieces() -> None:
    federation = federation_of(*WIDTH, "federation.size_fractions=[1,1,1]")
    info = federation.method.info
    width = len(federation.initial_state().state["bn1.weight"])
    expected = [6.0] * (width // 4) + [4.0] * (width // 4) + [2.0] * (width // 2)
    assert info.owners("bn1.weight").tolist() == expected  # type: ignore[union-attr]
    assert info.owners("fc.bias") == 6
    corner = info.owners("layer1.0.conv1.weight")
    assert isinstance(corner, torch.Tensor) and corner[0, 0, 0, 0] == 6 and corner[-1, 0, 0, 0] == 2


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_server_keeps_the_mean_over_all_owners_of_what_clients_keep(name: str) -> None:
    """SCAFFOLD's c and FedDyn's h: every coordinate over the clients that hold it, those yet to come at zero."""
    federation, server = after(3, *WIDTH, f"method.name={name}")
    store = federation.engine.clients.states.store  # type: ignore[attr-defined]
    sums: State = {key: torch.zeros_like(tensor) for key, tensor in server.method_state.items()}
    for client, made in server.client_state_rounds.items():
        part = federation.split.part(federation.sizes[client])
        for local, tensor in store.get(client, made).items():
            add_at(sums[part[local].name], part[local].index, tensor)
    owners = {key: federation.method.info.owners(key) for key in sums}
    for key, total in sums.items():
        torch.testing.assert_close(
            server.method_state[key], total / owners[key], rtol=1e-3, atol=1e-6
        )


def test_shares_of_pieces_by_hand() -> None:
    from motley.core.part import Piece
    from motley.core.update import ClientUpdate

    updates = [
        ClientUpdate(client=0, part={"a": Piece("w")}, delta={"a": torch.tensor([3.0, 3.0])}),
        ClientUpdate(
            client=1, part={"a": Piece("w", (slice(0, 1),))}, delta={"a": torch.tensor([6.0])}
        ),
    ]
    owners = {"w": torch.tensor([3.0, 1.0])}
    total = add_shares(
        {"w": torch.zeros(2)}, updates, lambda update: update.delta, lambda name, _: owners[name]
    )
    assert total["w"].tolist() == [3.0, 3.0]


# ---- HeteroFL


SHARDS = ("data.partition={name='shards', shards_per_client=2}", "federation.clients=6")


def test_answers_for_classes_a_client_lacks_are_zero_in_its_loss() -> None:
    federation = federation_of(*WIDTH, *SHARDS, "method.name=heterofl")
    clients, server = federation.engine.clients, federation.initial_state()  # type: ignore[attr-defined]
    job = federation.job(server, 1, 2)
    learner = clients.learner(job.size)
    clients.seat(learner, job, clients.plan(job), {})
    held = {int(label) for label in federation.dataset.train.targets[federation.partition.of(2)]}
    assert 0 < len(held) < 10
    assert learner.scratch["classes"]["present"].nonzero().flatten().tolist() == sorted(held)
    images, labels = learner.inputs, learner.targets = learner.batches.next(8)
    answers = learner.model(images)
    gone = [label for label in range(10) if label not in held]
    answers[:, gone] = 0
    expected = F.cross_entropy(answers, labels)
    torch.testing.assert_close(federation.method.client.loss(learner), expected)


def test_classifier_rows_are_the_mean_over_clients_that_have_the_label() -> None:
    federation = federation_of(
        *WIDTH, *SHARDS, "method.name=heterofl", "federation.clients_per_round=2"
    )
    server = federation.initial_state()
    federation.engine = watched = Watched(federation.engine)  # type: ignore[assignment]
    end, _ = federation.run_round(server)
    labels = federation.dataset.train.targets
    sums, counts = (
        torch.zeros_like(server.state["fc.weight"]),
        torch.zeros_like(server.state["fc.weight"]),
    )
    for upload in watched.uploads:
        index = federation.split.part(federation.sizes[upload.client])["fc.weight"].index
        for label in {int(label) for label in labels[federation.partition.of(upload.client)]}:
            row = select(sums, index)[label] if index else sums[label]
            row += upload.delta["fc.weight"][label]
            (select(counts, index) if index else counts)[label] += 1
    expected = server.state["fc.weight"] + sums / counts.clamp(min=1)
    torch.testing.assert_close(end.state["fc.weight"], expected)
    missing = [label for label in range(10) if counts[label].max() == 0]
    assert missing, "some label is at no client of the round"
    assert torch.equal(end.state["fc.bias"][missing], server.state["fc.bias"][missing])


@pytest.mark.parametrize("batch_size", [4, 2000], ids=["batches", "one-batch"])
def test_the_pass_leaves_each_size_with_the_statistics_of_its_clients_examples(
    batch_size: int,
) -> None:
    own = (
        "split.normalization_statistics=per-size",
        "evaluation.every=2",
        f"training.batch_size={batch_size}",
    )
    federation = federation_of(*WIDTH, "method.name=heterofl", *own, "server.ema_decay=0.5")
    first, record = federation.run_round(federation.initial_state())
    assert not record.scores and "collect" not in record.seconds
    end, record = federation.run_round(first)
    assert record.scores and "collect" in record.seconds
    assert end.ema is not None
    size = "resnet14-w0.5"
    model = federation.split.build(size)
    model.load_state_dict(take(end.ema, federation.split.part(size)))
    data = federation.engine.clients.data  # type: ignore[attr-defined]
    means, variances, counts = [], [], []
    for client in [c for c, own_size in enumerate(federation.sizes) if own_size == size]:
        images, _ = data.batch(torch.from_numpy(federation.partition.of(client)))
        maps = model.conv1(images)  # type: ignore[operator]
        means.append(maps.mean((0, 2, 3)) * len(images))
        variances.append(maps.var((0, 2, 3)) * len(images))
        counts.append(len(images))
    mean, variance = (
        (torch.stack(values).sum(0) / sum(counts)).detach() for values in (means, variances)
    )
    assert (max(counts) > COLLECTION_BATCH_FACTOR * batch_size) == (batch_size == 4)
    torch.testing.assert_close(end.ema[f"{size}/bn1.running_mean"], mean, rtol=1e-4, atol=1e-5)
    if batch_size == 2000:
        torch.testing.assert_close(
            end.ema[f"{size}/bn1.running_var"], variance, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("case", ["HeteroFL", "FjORD", "ScaleFL", "DepthFL"])
def test_steps_can_be_captured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federation_of(*CASES[case], "training.steps=3")
    train_step = federation.method.client.train_step
    places: dict[int, set[tuple[int, ...]]] = {}

    def guarded(learner: Any) -> torch.Tensor:
        with NoValueIsRead():
            loss = train_step(learner)
        states = [learner.state, learner.client_state, *learner.scratch.values()]
        addresses = tuple(tensor.data_ptr() for state in states for tensor in state.values())
        places.setdefault(id(learner), set()).add(addresses)
        return loss

    monkeypatch.setattr(federation.method.client, "train_step", guarded)
    played(federation, federation.initial_state(), 2)
    assert places and all(len(seen) == 1 for seen in places.values())


def test_owners_without_pieces_are_counted_by_name() -> None:
    federation = federation_of("split.name=depth")
    training = federation.config.training
    info = FederationInfo(
        federation.split, federation.sizes, 10, 1, training, ImageShape(1, 16, 16)
    )
    assert {info.owners(name) for name in federation.split.parameters} == {2, 4, 6}
