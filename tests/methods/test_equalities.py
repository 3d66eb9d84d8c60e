"""Where methods must agree: with FedAvg, with each other, and with what they keep of themselves."""

from __future__ import annotations

import pytest
import torch

from motley.client.training import TrainingSettings
from motley.core.merge import apply
from motley.core.part import Piece, State
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.methods import METHODS, FederationInfo
from motley.methods.fednova import FedNova, FedNovaSettings, progress
from motley.models import ImageShape
from motley.server.inco import inco
from motley.server.state import ServerState
from tests.conftest import chosen, tiny_config
from tests.methods.turns import same_bits

PLAIN = (
    "training.batch_size=16",
    "training.epochs=0.2",
    "training.rounds=9",
    "evaluation.every=9",
    "server.ema_decay=0",
    "split.normalization_statistics=shared",
)
SGD = ("training.optimizer.name=sgd", "training.optimizer.lr=0.05")
MOMENTUM = (*SGD, "training.optimizer.momentum=0.9")


def after(rounds: int, *overrides: str) -> tuple[Federation, ServerState]:
    federation = Federation(tiny_config(*PLAIN, *overrides))
    server = federation.initial_state()
    for _ in range(rounds):
        server, _ = federation.run_round(server)
    return federation, server


def memories(federation: Federation, server: ServerState) -> dict[int, State]:
    store = federation.engine.clients.states.store  # type: ignore[attr-defined]
    return {client: store.get(client, made) for client, made in server.client_state_rounds.items()}


# ---- equal to FedAvg


@pytest.mark.parametrize("optimizer", [(), MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("method.name=fedprox", "method.mu=0"),
        ("method.name=moon", "method.mu=0"),
        ("method.name=fedgen", "method.alpha=0", "method.beta=0"),
        ("server.optimizer={name='momentum', beta1=0}",),
        ("method.name=fednova", "training.steps=3"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_term_of_no_weight_is_fedavg_bit_for_bit(
    overrides: tuple[str, ...], optimizer: tuple[str, ...]
) -> None:
    steps = [override for override in overrides if override.startswith("training.steps")]
    _, plain = after(2, *optimizer, *steps)
    _, other = after(2, *optimizer, *overrides)
    assert same_bits(other.state, plain.state)


@pytest.mark.parametrize(("name", "exactly"), [("scaffold", True), ("moon", False)])
def test_the_first_turn_is_fedavgs(name: str, exactly: bool) -> None:
    """Control variates are zero, and a previous model is the received one, so two gradients cancel.

    MOON's cancel up to rounding. Two steps only: after more, a rounding error may have moved an activation across the
    kink of a ReLU, which changes the gradients by much more.
    """
    few_steps = () if exactly else ("training.steps=2",)
    _, plain = after(1, *SGD, *few_steps)
    _, other = after(1, *SGD, *few_steps, f"method.name={name}")
    for key, tensor in plain.state.items():
        torch.testing.assert_close(
            other.state[key], tensor, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-6
        )
    _, plain = after(2, *SGD)
    _, other = after(2, *SGD, f"method.name={name}")
    apart = max(float((other.state[n] - plain.state[n]).abs().max()) for n in plain.state)
    assert apart > 1e-4, "later turns are not"


def test_feddyn_without_strength_trains_like_fedavg_and_adds_the_mean_of_all_duals() -> None:
    federation, plain = after(1)
    _, dynamic = after(1, "method.name=feddyn", "method.alpha=1e-30")
    start = federation.initial_state()
    sampled = federation.sample(1)
    for name in federation.split.parameters:
        size_owners = [
            c for c, size in enumerate(federation.sizes) if name in federation.split.part(size)
        ]
        present = [c for c in sampled if c in size_owners]
        change = plain.state[name] - start.state[name]
        expected = start.state[name] + change * (1 + len(present) / len(size_owners))
        torch.testing.assert_close(dynamic.state[name], expected, rtol=1e-4, atol=1e-6)
    buffers = start.state.keys() - federation.split.parameters
    assert all(torch.equal(dynamic.state[name], plain.state[name]) for name in buffers)


def test_fedspeed_that_does_not_climb_is_feddyn() -> None:
    _, dynamic = after(2, "method.name=feddyn")
    _, speed = after(2, "method.name=fedspeed", "method.rho=0")
    assert same_bits(speed.state, dynamic.state)


def test_fedsam_that_does_not_climb_is_fedavg() -> None:
    _, plain = after(2)
    _, flat = after(2, "method.name=fedsam", "method.rho=0")
    assert same_bits(flat.state, plain.state)


@pytest.mark.parametrize("name", [entry.name for entry in METHODS])
def test_layers_of_one_architecture_are_the_whole_of_it(name: str) -> None:
    one = ("model.sizes=['resnet14']", *chosen(name))
    ends = [
        after(2, *one, f"split.name={split}")[1] for split in ("homogeneous", "depth", "grouped")
    ]
    assert same_bits(ends[0].state, ends[1].state)
    assert same_bits(
        ends[0].state, {n.removeprefix("resnet14/"): t for n, t in ends[2].state.items()}
    )


def test_fedavg_over_parts_is_the_mean_over_owners() -> None:
    federation = Federation(tiny_config(*PLAIN))
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in federation.sample(1)]
    uploads = federation.engine.train(jobs, lambda client: None)
    end, _ = federation.run_round(server)
    for name in federation.split.parameters:
        given = [upload.delta[name] for upload in uploads if name in upload.delta]
        expected = server.state[name] + (torch.stack(given).mean(0) if given else 0)
        torch.testing.assert_close(end.state[name], expected, rtol=1e-5, atol=1e-7)


# ---- FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7, 300])
def test_progress_with_momentum_has_the_papers_closed_form(momentum: float, steps: int) -> None:
    closed = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    assert progress(steps, momentum, 0.0) == pytest.approx(closed, rel=1e-12)


def test_progress_with_a_proximal_term_follows_the_papers_recursion() -> None:
    distance = 0.0
    for steps in range(1, 20):
        distance = (1 - 0.03) * distance + 1
        assert progress(steps, 0.0, 0.03) == pytest.approx(distance, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_progress_is_how_far_torchs_sgd_goes_along_a_constant_gradient(
    momentum: float, mu: float
) -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    for _ in range(9):
        weight.grad = -1 + mu * weight.detach()
        optimizer.step()
    assert weight.item() / 0.1 == pytest.approx(progress(9, momentum, 0.1 * mu), rel=1e-5)


def nova(split: object, **settings: object) -> FedNova:
    info = FederationInfo(split, (), 10, 1, TrainingSettings(), ImageShape(1, 8, 8))  # type: ignore[arg-type]
    return FedNova(FedNovaSettings(**settings), info)  # type: ignore[arg-type]


class Names:
    """As much of a split as FedNova looks at."""

    parameters = frozenset({"a.weight", "b.weight"})


PART = {name: Piece(name) for name in ("a.weight", "b.weight", "a.running_var")}
STATE = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(1), "a.running_var": torch.ones(2)}


def update(
    client: int, part: dict[str, Piece], value: float, steps: int, weight: float
) -> ClientUpdate:
    change = {
        local: torch.full_like(STATE[p.name] if p.index is None else STATE[p.name][p.index], value)
        for local, p in part.items()
    }
    message = {"progress": torch.tensor(float(steps))}
    return ClientUpdate(
        client=client,
        part=part,
        delta=change,
        weight=weight,
        payload=message,
        num_examples=int(weight),
        num_steps=steps,
    )


def test_steps_in_proportion_to_samples_give_the_uniform_mean_times_a_server_step() -> None:
    samples, values = [10, 20, 50], [0.3, -0.1, 0.2]
    updates = [
        update(i, PART, v, 2 * n, n) for i, (n, v) in enumerate(zip(samples, values, strict=True))
    ]
    change = nova(Names()).server.aggregate({}, STATE, updates).delta
    server_step = 3 * sum(n * n for n in samples) / sum(samples) ** 2
    assert server_step > 1
    assert change["a.weight"].tolist() == pytest.approx(
        [server_step * sum(values) / 3] * 2, rel=1e-6
    )
    weighted = sum(n * v for n, v in zip(samples, values, strict=True)) / sum(samples)
    assert change["a.running_var"].tolist() == pytest.approx([weighted] * 2, rel=1e-6)


def test_tau_is_a_layers_own_and_in_pieces_a_coordinates_own() -> None:
    """B is held by clients 1 and 2 only, and a's second coordinate by client 2 alone."""
    first = {"a.weight": Piece("a.weight", (slice(0, 1),))}
    second = {**first, "b.weight": Piece("b.weight")}
    updates = [
        update(0, first, 1.0, 1, 1.0),
        update(1, second, 2.0, 4, 1.0),
        update(2, PART, 3.0, 10, 1.0),
    ]
    change = nova(Names()).server.aggregate({}, STATE, updates).delta
    assert change["b.weight"].item() == pytest.approx((2 / 4 + 3 / 10) / 2 * 7, rel=1e-6)
    assert change["a.weight"].tolist() == pytest.approx(
        [(1 / 1 + 2 / 4 + 3 / 10) / 3 * 5, 3.0], rel=1e-6
    )


def test_with_a_proximal_term_the_server_counts_steps() -> None:
    updates = [update(0, PART, 1.0, 2, 1.0), update(1, PART, 3.0, 6, 1.0)]
    halved = [
        ClientUpdate(**{**vars(u), "payload": {"progress": u.payload["progress"] / 2}})
        for u in updates
    ]
    change = nova(Names(), mu=0.1).server.aggregate({}, STATE, halved).delta
    assert change["a.weight"].tolist() == pytest.approx([(1 / 1 + 3 / 3) / 2 * 4] * 2, rel=1e-6)


def test_scaled_buffers_are_the_deviation_and_a_variance_stays_at_zero_or_above() -> None:
    updates = [update(0, PART, -0.9, 1, 1.0), update(1, PART, -0.9, 9, 1.0)]
    for scaled, expected in ((False, -0.9), (True, -0.9 * (1 + 1 / 9) / 2 * 5)):
        merged = nova(Names(), scale_buffers=scaled).server.aggregate({}, STATE, updates)
        assert merged.delta["a.running_var"].tolist() == pytest.approx([expected] * 2, rel=1e-6)
        state = apply(STATE, merged, Names.parameters)
        assert state["a.running_var"].tolist() == pytest.approx(
            [max(0.0, 1 + expected)] * 2, abs=1e-6
        )


# ---- SCAFFOLD


@pytest.mark.parametrize("split", ["depth", "grouped"])
@pytest.mark.parametrize("initial", ["zeros", "weights"])
def test_c_is_the_mean_of_all_owners_c_i_after_every_round(split: str, initial: str) -> None:
    """With InCo on: control variates follow what clients did, not what InCo made of it."""
    settings = ("method.name=scaffold", f"method.initial={initial}", f"split.name={split}")
    federation = Federation(tiny_config(*PLAIN, *settings, "server.inco.variant=official"))
    server = federation.initial_state()
    zero = initial == "zeros"
    assert server.method_state.keys() == federation.split.parameters
    assert all(
        bool(tensor.any()) != zero
        for name, tensor in server.method_state.items()
        if name.endswith("conv1.weight")
    )
    for _ in range(3):
        server, _ = federation.run_round(server)
        own = {
            c: federation.method.client.initial_client_state(size, {})
            for c, size in enumerate(federation.sizes)
        }
        own.update(memories(federation, server))
        for name, control in server.method_state.items():
            parts = {c: federation.split.part(size) for c, size in enumerate(federation.sizes)}
            given = [
                own[c][local]
                for c, part in parts.items()
                for local, p in part.items()
                if p.name == name
            ]
            torch.testing.assert_close(control, torch.stack(given).mean(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("divide_by", "inner", "outer"), [("all", 1.0, 0.5), ("sampled", 3.0, 2.0)]
)
def test_c_by_hand_over_all_clients_and_over_the_sampled_ones(
    divide_by: str, inner: float, outer: float
) -> None:
    """Two of six clients took part: a wide one changed its c_i by 2, a narrow one by 4.

    All six hold the inner channels, and the four wide ones the outer channels.
    """
    settings = ("split={name='width', rates=[1, 0.5]}", "federation.size_fractions=[4, 2]")
    federation = Federation(
        tiny_config(
            *PLAIN,
            *settings,
            "model.sizes=['resnet10']",
            "method.name=scaffold",
            f"method.divide_by={divide_by}",
        )
    )
    updates = []
    for client, change in ((0, 2.0), (5, 4.0)):
        size = federation.sizes[client]
        part = federation.split.part(size)
        shapes = federation.split.blueprints[size].module.named_parameters()
        payload = {name: torch.full(tensor.shape, change) for name, tensor in shapes}
        # Control variates are averaged uniformly, whatever weight the delta has.
        updates.append(
            ClientUpdate(
                client=client, part=part, delta={}, size=size, payload=payload, weight=client + 1.0
            )
        )
    own = federation.initial_state().method_state
    after_round = federation.method.server.update(own, {}, updates)
    bias = after_round["layer1.0.bn1.bias"]
    half = len(bias) // 2
    assert bias.tolist() == pytest.approx([inner] * half + [outer] * half)


def test_one_full_batch_a_turn_with_everybody_is_gradient_descent() -> None:
    settings = (
        "model.sizes=['mlp2']",
        "split.name=homogeneous",
        "federation.clients_per_round=6",
        *SGD,
    )
    whole = ("training.steps=1", "training.batch_size=1437")
    _, plain = after(3, *settings, *whole)
    _, controlled = after(3, *settings, *whole, "method.name=scaffold")
    assert not same_bits(controlled.state, plain.state)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(controlled.state[name], tensor, rtol=1e-4, atol=1e-6)


# ---- FedDyn and FedSpeed


@pytest.mark.parametrize("name", ["feddyn", "fedspeed"])
@pytest.mark.parametrize("split", ["depth", "grouped"])
def test_the_servers_mean_is_that_of_all_owners_duals(name: str, split: str) -> None:
    """-h / alpha of the paper: the authors' code adds the mean of all clients' lambda in its place."""
    federation = Federation(tiny_config(*PLAIN, f"method.name={name}", f"split.name={split}"))
    server = federation.initial_state()
    assert server.method_state.keys() == federation.split.parameters and not any(
        t.any() for t in server.method_state.values()
    )
    for _ in range(3):
        server, _ = federation.run_round(server)
        own = memories(federation, server)
        for global_name, mean in server.method_state.items():
            total, owners = torch.zeros_like(mean), 0
            for client, size in enumerate(federation.sizes):
                for local, piece in federation.split.part(size).items():
                    if piece.name == global_name:
                        owners += 1
                        total += own[client][local] if client in own else 0
            torch.testing.assert_close(mean, total / owners, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["feddyn", "fedspeed", "fedimpro-dyn"])
def test_the_center_of_feddyns_steps_is_computed_once_for_every_client(name: str) -> None:
    """One learner trains clients one after the other, and each has a dual variable of its own."""
    one_size = ("model.sizes=['resnet10']", "split.name=homogeneous")
    federation, server = after(2, f"method.name={name}", *one_size)
    jobs = [federation.job(server, 3, client) for client in server.client_state_rounds]
    clients = federation.engine.clients  # type: ignore[attr-defined]
    learner = clients.learner("resnet10")
    for job in jobs[:2]:
        job, client_state = clients.states.resume(job)
        assert any(dual.any() for dual in client_state.values())
        clients.seat(learner, job, clients.plan(job), client_state)
        center = learner.scratch["center"]
        places = {tensor.data_ptr() for tensor in center.values()}
        for length in learner.lengths:
            learner.step(length)
        assert same_bits(center, {n: job.state[n] - dual for n, dual in client_state.items()})
        assert {tensor.data_ptr() for tensor in center.values()} == places


def test_the_dual_is_added_after_inco() -> None:
    """Where InCo is on, its target's change is refined first: h never passes through its normalisation."""
    federation, before = after(1, "method.name=feddyn", "server.inco.variant=official")
    federation.sample = lambda number, attempt=0: [4, 5]
    jobs = [federation.job(before, 2, client) for client in (4, 5)]
    uploads = federation.engine.train(jobs, lambda client: None)
    end, _ = federation.run_round(before)
    mean = {
        name: (uploads[0].delta[name] + uploads[1].delta[name]) / 2 for name in uploads[0].delta
    }
    refined, _ = inco(mean, federation.split.cross_layers, federation.config.server.inco)
    for pair in federation.split.cross_layers:
        expected = before.state[pair.target] + refined[pair.target] + end.method_state[pair.target]
        torch.testing.assert_close(end.state[pair.target], expected, rtol=1e-5, atol=1e-6)
