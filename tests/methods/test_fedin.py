"""FedIN: gradients and their combination by hand, which layers they reach, whose features go where, and noise."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.methods.fedin import SCRATCH, FedINClient, FedInSettings, intermediate, projected
from motley.methods.fedin_pool import IN, OUT, collect, draw, entries
from motley.models.stages import chain_of, run
from tests.conftest import refused
from tests.methods import turns
from tests.methods.turns import SGD, jobs_of, same_bits, seated

MLP = ("model.sizes=['mlp2','mlp3']", "model.mlp.hidden=12", *SGD)
federation_of, after = (partial(made, name="fedin") for made in (turns.federation_of, turns.after))


def client_of(federation: Federation) -> FedINClient:
    client = federation.method.client
    assert isinstance(client, FedINClient)
    return client


# ---- the combination of gradients


def test_the_exact_combination_on_three_numbers() -> None:
    """B = -5, a = 5, so G_IN + G_local is left, which is orthogonal to G_local; where b >= 0 G_IN stays as it is."""
    local = {"a": torch.tensor([1.0, 2.0, 0.0]), "b": torch.tensor([1.0, 0.0]), "c": torch.zeros(2)}
    inner = {
        "a": torch.tensor([3.0, -4.0, 7.0]),
        "b": torch.tensor([2.0, -9.0]),
        "c": torch.ones(2),
    }
    combined = projected(inner, local)
    assert combined["a"].tolist() == [4.0, -2.0, 7.0]
    assert float(combined["a"] @ local["a"]) == 0
    assert combined["b"].tolist() == [2.0, -9.0] and combined["c"].tolist() == [1.0, 1.0]


def test_the_exact_combination_is_the_nearest_that_does_not_point_against_the_local_gradient() -> (
    None
):
    numbers = torch.Generator().manual_seed(0)
    local, inner = (
        {str(n): torch.randn(3, 4, generator=numbers) for n in range(20)} for _ in range(2)
    )
    for name, one in projected(inner, local).items():
        g_in, g_local = inner[name], local[name]
        product = float((one * g_local).sum())
        if float((g_in * g_local).sum()) < 0:
            assert product == pytest.approx(0, abs=1e-5)
        else:
            assert torch.equal(one, g_in)
        for _ in range(50):
            other = one + 0.3 * torch.randn(3, 4, generator=numbers)
            if float((other * g_local).sum()) >= 0:
                assert (g_in - other).norm() >= (g_in - one).norm() - 1e-6


def reference(
    model: Any, batches: list[tuple[Tensor, Tensor]], s_in: Tensor, s_out: Tensor, rule: str
) -> nn.Module:
    """One client's turn as the paper writes it, with autograd and plain gradient descent."""
    lr, mu = 0.05, 0.7
    rule, _, norms = rule.partition(" by ")
    start = copy.deepcopy(model)
    inside = set(intermediate(model))
    for images, labels in batches:
        chain = chain_of(model)
        loss = nn.functional.cross_entropy(model(images), labels)
        away = [p - q for p, q in zip(model.parameters(), start.parameters(), strict=True)]
        distance = sum(offset.norm() if norms else offset.square().sum() for offset in away)
        local = torch.autograd.grad(loss + mu / 2 * distance, list(model.parameters()))
        guess = nn.functional.mse_loss(run(chain[1:-1], s_in), s_out)
        inner = torch.autograd.grad(guess, list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for (name, p), g, h in zip(list(model.named_parameters()), local, inner, strict=True):
                if name not in inside:
                    assert h is None
                    p -= lr * g
                elif rule == "exact":
                    b = float((g * h).sum())
                    p -= lr * (h if b >= 0 else h - b / float((g * g).sum()) * g)
                elif rule == "separate":
                    p -= lr * g
                else:
                    p -= lr * (h + {"simplified": 0.5, "sum": 1.0, "heavy": 1.5}[rule] * g)
        if rule == "separate":
            guess = nn.functional.mse_loss(run(chain_of(model)[1:-1], s_in), s_out)
            grads = torch.autograd.grad(
                guess, [p for n, p in model.named_parameters() if n in inside]
            )
            with torch.no_grad():
                for p, h in zip(
                    [p for n, p in model.named_parameters() if n in inside], grads, strict=True
                ):
                    p -= lr * h
    return model  # type: ignore[no-any-return]


RULES = {
    "simplified": ("method.combine=simplified",),
    "heavy": ("method.multiplier=3",),
    "sum": ("method.combine=sum",),
    "exact": ("method.combine=exact",),
    "separate": ("method.step=separate",),
    "simplified by norms": ("method.proximal=norms",),
    "exact by norms": ("method.combine=exact", "method.proximal=norms"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_turn_is_the_papers(rule: str) -> None:
    federation, server = after(1, *MLP, "method.mu=0.7", "training.epochs=1", *RULES[rule])
    images = torch.from_numpy(federation.dataset.train.inputs).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(federation.dataset.train.targets)
    jobs = jobs_of(federation, server)
    uploads = federation.engine.train(jobs, lambda client: None)
    assert {job.size for job in jobs} == {"mlp2", "mlp3"}
    for job, upload in zip(jobs, uploads, strict=True):
        plan = federation.engine.clients.plan(job)  # type: ignore[attr-defined]
        rows = [plan.rows[step, :length] for step, length in enumerate(plan.lengths)]
        model = federation.split.build(job.size)
        model.load_state_dict(job.state)
        resized = nn.functional.interpolate(images, (8, 8), mode="bilinear", antialias=False)
        batches = [(resized[row], labels[row]) for row in rows]
        expected = reference(
            model, batches, job.broadcast[IN], job.broadcast[OUT], rule
        ).state_dict()
        for name, change in upload.delta.items():
            torch.testing.assert_close(
                job.state[name] + change, expected[name], rtol=1e-4, atol=2e-6
            )
        assert_features_are(upload, model, batches[0][0])


def assert_features_are(upload: ClientUpdate, trained: nn.Module, images: Tensor) -> None:
    """A client sends what entered and left the intermediate layers of its trained model on its first batch."""
    chain = chain_of(trained)
    with torch.no_grad():
        s_in = run(chain[:1], images)
        torch.testing.assert_close(upload.payload[IN], s_in, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(
            upload.payload[OUT], run(chain[1:-1], s_in), rtol=1e-3, atol=1e-5
        )


def test_the_inner_gradient_reaches_intermediate_layers_only() -> None:
    federation, server = after(1, "method.step=separate", *SGD)
    _, plain = after(1, *SGD, name="fedprox")
    assert same_bits(server.state, plain.state), "a first round has no features"
    job = jobs_of(federation, server)[-1]
    learner = seated(federation, job)
    inside = set(intermediate(learner.model))
    assert inside == {name for name in learner.params if name.startswith("layer")}
    learner.backward(client_of(federation).inner_loss(learner))
    assert learner.grads.keys() == inside
    assert not learner.broadcast[IN].requires_grad and learner.broadcast[IN].grad is None
    ends = [
        after(2, *more, *SGD, "training.steps=1")[1]
        for more in (("method.step=separate",), ("method.samples=0",))
    ]
    for name in federation.split.parameters:
        assert torch.equal(ends[0].state[name], ends[1].state[name]) == (name not in inside), name


@pytest.mark.parametrize("running", ["both", "local"])
def test_whose_passes_move_running_statistics(running: str) -> None:
    federation, server = after(1, *SGD, f"method.running={running}")
    learner = seated(federation, jobs_of(federation, server)[0])
    before = {name: tensor.clone() for name, tensor in learner.state.items() if "running" in name}
    learner.backward(client_of(federation).inner_loss(learner))
    moved = {
        name for name, tensor in before.items() if not torch.equal(tensor, learner.state[name])
    }
    assert moved == (
        {name for name in before if name.startswith("layer")} if running == "both" else set()
    )


# ---- the same as other methods


@pytest.mark.parametrize(
    "overrides", [(), SGD, (*SGD, "method.proximal=norms")], ids=["adam", "sgd", "norms"]
)
def test_without_features_it_is_fedprox_bit_for_bit(overrides: tuple[str, ...]) -> None:
    _, plain = after(2, *overrides, name="fedprox")
    federation, without = after(2, *overrides, "method.samples=0")
    assert same_bits(without.state, plain.state) and not without.method_state
    assert not any(job.broadcast for job in jobs_of(federation, without))
    _, other = after(2, *overrides)
    assert not same_bits(other.state, plain.state)


def test_without_proximal_term_and_features_it_is_fedavg() -> None:
    _, plain = after(2, name="fedavg")
    assert same_bits(after(2, "method.mu=0", "method.samples=0")[1].state, plain.state)


# ---- the pool


def given(clients: dict[int, float], width: int = 3) -> list[ClientUpdate]:
    def message(value: float) -> State:
        return {IN: torch.full((2, width), value), OUT: torch.full((2, 1), value)}

    return [
        ClientUpdate(client=client, part={}, delta={}, payload=message(value))
        for client, value in clients.items()
    ]


SHAPES = (torch.Size([3]), torch.Size([1]))


def drawn(pool: State, client: int, count: int = 1, seed: int = 0) -> list[float]:
    message = draw(pool, client, SHAPES, count, np.random.default_rng(seed))
    assert not message or (
        message[IN].shape == (2 * count, 3) and message[OUT].shape == (2 * count, 1)
    )
    return message[OUT][::2, 0].tolist() if message else []


def test_a_client_never_receives_its_own_features() -> None:
    pool = collect({}, given({1: 1.0, 2: 2.0, 3: 3.0}), 100, stale=True)
    for client in (1, 2, 3, 4):
        values = {value for seed in range(40) for value in drawn(pool, client, seed=seed)}
        assert values == {1.0, 2.0, 3.0} - {float(client)}
    assert drawn(collect({}, given({1: 1.0}), 100, stale=True), 1) == []


def test_in_a_federation_too_nobody_receives_its_own() -> None:
    federation, server = after(3, *MLP, "method.samples=3")
    own = {
        entry.client: server.method_state[entry.name(OUT)] for entry in entries(server.method_state)
    }
    assert len(own) == 6
    for client in range(6):
        for number in range(4, 30):
            received = federation.job(server, number, client).broadcast[OUT].split(16)
            assert len(received) == 3
            senders = {
                c
                for c, features in own.items()
                for batch in received
                if torch.equal(batch, features)
            }
            assert senders and client not in senders


def test_the_newest_of_each_client_are_kept_and_no_more_than_asked() -> None:
    pool: State = {}
    for number in range(1, 8):
        pool = collect(pool, given({number: float(number), 0: 10.0 * number}), 4, stale=True)
        held = entries(pool)
        assert len(held) == min(number + 1, 4) and len(pool) == 2 * len(held)
        assert len({entry.client for entry in held}) == len(held)
    assert [entry.client for entry in held] == [5, 6, 0, 7]
    assert set(drawn(pool, 9, 4)) == {5.0, 6.0, 7.0, 70.0}


def test_stale_features_can_be_left_out() -> None:
    pool = collect({}, given({1: 1.0, 2: 2.0}), 100, stale=False)
    pool = collect(pool, given({3: 3.0}), 100, stale=False)
    assert [entry.client for entry in entries(pool)] == [3]
    assert drawn(pool, 3) == []


def test_where_the_pool_has_fewer_some_come_again() -> None:
    pool = collect({}, given({1: 1.0, 2: 2.0}), 100, stale=True)
    assert set(drawn(pool, 1, 5)) == {2.0} and len(drawn(pool, 3, 5)) == 5
    assert sorted(drawn(pool, 3, 2)) == [1.0, 2.0]


def test_features_of_another_shape_are_not_handed_out() -> None:
    pool = collect({}, [*given({1: 1.0}), *given({2: 2.0}, width=4)], 100, stale=True)
    assert {value for seed in range(20) for value in drawn(pool, 3, seed=seed)} == {1.0}


@pytest.mark.parametrize("rows", [5, 16, 40])
def test_every_batch_of_features_has_the_length_asked_for(rows: int) -> None:
    """Also that of a client that has fewer examples: it repeats them."""
    federation, server = after(1, *MLP, f"method.batch={rows}", "training.epochs=1")
    assert {tensor.shape[0] for tensor in server.method_state.values()} == {rows}
    small = federation.engine.clients.partition.sizes.argmin()  # type: ignore[attr-defined]
    job = federation.job(server, 2, int(small))
    reply = federation.engine.train([job], lambda client: None)[0].payload
    samples = federation.engine.clients.samples(job.client)  # type: ignore[attr-defined]
    distinct = len(torch.unique(reply[IN], dim=0))
    assert distinct == min(rows, samples)


# ---- what the round's record has of it


@pytest.mark.parametrize("step", ["joint", "separate"])
def test_the_record_has_the_inner_loss_the_pool_and_what_its_features_weigh(step: str) -> None:
    federation, server = after(0, *MLP, f"method.step={step}", "training.steps=1")
    server, record = federation.run_round(server)
    features = 16 * (12 + 12) * 4
    assert record.metrics == pytest.approx(
        {"method/pool": 4, "method/feature_mb_up": 4 * features / 1e6}
    ), "a first round has no loss"
    learners = [seated(federation, job) for job in jobs_of(federation, server)]
    losses = [client_of(federation).inner_loss(learner).item() for learner in learners]
    server, record = federation.run_round(server)
    assert record.metrics["method/pool"] == len(entries(server.method_state))
    local_step_first = {"joint": 1e-5, "separate": 0.3}[step]
    assert record.metrics["method/in_loss"] == pytest.approx(
        sum(losses) / len(losses), rel=local_step_first
    )
    _, without = federation_of(*MLP, "method.samples=0").run_round(federation.initial_state())
    assert without.metrics == {}


# ---- noise


@pytest.mark.parametrize("where", ["forward", "upload"])
def test_noise_has_the_scale_asked_for(where: str) -> None:
    federation = federation_of("method.noise=0.8", f"method.noise_on={where}")
    features = 3 + 2 * torch.randn(400, 50)
    torch.manual_seed(0)
    noise = client_of(federation)._noisy(features, where) - features
    assert float(noise.std()) == pytest.approx(0.8 * float(features.std()), rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.05)
    kurtosis = (noise / noise.std()).pow(4).mean()
    assert float(kurtosis) == pytest.approx(3, abs=0.15)
    other = "upload" if where == "forward" else "forward"
    assert client_of(federation)._noisy(features, other) is features


def test_noise_per_coordinate_follows_each_values_deviation_over_the_batch() -> None:
    """Values of deviation 1, 3 and 0 over the batch: the last one stays as it is."""
    options = ("method.noise=0.8", "method.noise_deviation=coordinate")
    federation = federation_of(*options)
    signs = torch.tensor([1.0, -1.0]).repeat(10_000)
    features = torch.stack([signs, 3 * signs + 5, torch.full_like(signs, 7.0)], dim=1)
    torch.manual_seed(0)
    noise = client_of(federation)._noisy(features, "forward") - features
    assert noise.std(0).tolist() == pytest.approx([0.8, 2.4, 0.0], rel=0.03)
    torch.manual_seed(0)
    whole = client_of(federation_of("method.noise=0.8"))._noisy(features, "forward") - features
    deviation = float(features.std(correction=0))
    assert whole.std(0).tolist() == pytest.approx([0.8 * deviation] * 3, rel=0.03)


def test_noise_on_upload_leaves_training_alone_and_changes_what_is_sent() -> None:
    _, plain = after(1)
    _, upload = after(1, "method.noise=0.8", "method.noise_on=upload")
    _, forward = after(1, "method.noise=0.8")
    assert same_bits(upload.state, plain.state) and not same_bits(forward.state, plain.state)
    for name, clean in plain.method_state.items():
        off = upload.method_state[name] - clean
        assert float(off.std()) == pytest.approx(0.8 * float(clean.std()), rel=0.15)


@torch.no_grad()
def test_noise_in_training_is_on_what_enters_and_leaves_the_intermediate_layers() -> None:
    federation, server = after(0, *MLP, "method.noise=0.5")
    learner = seated(federation, jobs_of(federation, server)[0])
    images = learner.first_inputs(16)
    chain = chain_of(learner.model)
    s_in, s_out = client_of(federation).features(learner.model, images)
    clean = run(chain[:1], images)
    assert float((s_in - clean).std()) == pytest.approx(0.5 * float(clean.std()), rel=0.2)
    without = run(chain[1:-1], s_in)
    assert float((s_out - without).std()) == pytest.approx(0.5 * float(without.std()), rel=0.2)


# ---- unlike widths and families


FAMILIES = (
    "model.sizes=['vit1','cnn']",
    "model.vit={patch=4, dim=12, heads=2}",
    "split.name=grouped",
    "method.projection=24",
    "training.steps=2",
)


def test_models_of_two_families_exchange_projected_features() -> None:
    federation, server = after(1, *FAMILIES, *SGD)
    assert {tensor.shape for tensor in server.method_state.values()} == {(16, 24)}
    sizes = {client: size for client, size in enumerate(federation.sizes)}
    senders: set[tuple[str, str]] = set()
    for number in range(2, 30):
        for client in range(6):
            received = federation.job(server, number, client).broadcast[IN]
            sender = next(
                e.client
                for e in entries(server.method_state)
                if torch.equal(server.method_state[e.name(IN)], received)
            )
            senders.add((sizes[sender], sizes[client]))
    assert senders == {(one, other) for one in ("vit1", "cnn") for other in ("vit1", "cnn")}
    learner = seated(federation, federation.job(server, 2, 0))
    first = client_of(federation).inner_loss(learner).item()
    for _ in range(40):
        learner.backward(client_of(federation).inner_loss(learner))
        learner.optimize(intermediate(learner.model))
    assert client_of(federation).inner_loss(learner).item() < first


def test_a_projection_comes_back_by_its_transpose() -> None:
    federation, server = after(1, *FAMILIES)
    for client in (0, 5):
        learner = seated(federation, federation.job(server, 2, client))
        for matrix in (learner.scratch[SCRATCH][IN], learner.scratch[SCRATCH][OUT]):
            wide = matrix.shape[0] <= matrix.shape[1]
            product = matrix @ matrix.t() if wide else matrix.t() @ matrix
            torch.testing.assert_close(product, torch.eye(len(product)), rtol=0, atol=1e-5)
        vectors = learner.broadcast[IN]
        there = client_of(federation).restored(learner, vectors)
        assert there.shape[1:] == client_of(federation)._shapes[learner.size][0]


def test_without_a_projection_families_keep_their_features_to_themselves() -> None:
    federation, server = after(2, *FAMILIES, "method.projection=0", *SGD)
    shapes = {size: client_of(federation)._shapes[size][0] for size in ("vit1", "cnn")}
    for client in range(6):
        message = federation.job(server, 3, client).broadcast
        assert message and message[IN].shape[1:] == shapes[federation.sizes[client]]


# ---- settings


def test_models_without_intermediate_layers_are_refused() -> None:
    with pytest.raises(MotleyError, match=r"model\.sizes: 'mlp1' has no layers between"):
        federation_of("model.sizes=['mlp1','mlp2']")


def test_separate_steps_combine_nothing() -> None:
    said = refused("method.name=fedin", "method.step=separate", "method.combine=exact")
    assert "combine = 'exact' is for step = 'joint'" in said


def test_the_defaults_are_the_papers() -> None:
    settings = load_config(overrides=["method.name=fedin"]).method
    assert isinstance(settings, FedInSettings)
    assert (settings.mu / 2, settings.combine, settings.multiplier, settings.samples) == (
        0.05,
        "simplified",
        1,
        1,
    )
