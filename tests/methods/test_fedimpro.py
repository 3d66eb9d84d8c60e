"""FedImpro: statistics of features, what is drawn from them, who learns from it, and FedAvg where nothing is drawn."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motley.analysis.gradient_variance import gradient_variance
from motley.client.learner import Learner
from motley.config import load_config, read_resolved
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.methods.fedimpro import (
    DRAWN_LOSS,
    OWN,
    SCRATCH,
    WEIGHT,
    FedImproClient,
    FedImproSettings,
)
from motley.methods.fedimpro_statistics import balanced, draw, moments, pooled, repeated
from motley.models.stages import chain_of, owned, run
from motley.server.state import ServerState
from tests.conftest import refused, written
from tests.methods import turns
from tests.methods.turns import SGD, same_bits, seated

MLP = ("model.sizes=['mlp2']", "split.name=homogeneous", "model.mlp.hidden=6", *SGD)
LAST = ("method.beta_m=0", "method.beta_g=0")
federation_of, after = (
    partial(made, name="fedimpro") for made in (turns.federation_of, turns.after)
)


def client_of(federation: Federation) -> FedImproClient:
    client = federation.method.client
    assert isinstance(client, FedImproClient)
    return client


def first_learner(*overrides: str) -> tuple[Federation, Learner]:
    federation = federation_of(*overrides)
    return federation, seated(federation, federation.job(federation.initial_state(), 1, 0))


def statistics(server: ServerState) -> tuple[Tensor, Tensor]:
    (mean,) = [tensor for name, tensor in server.method_state.items() if name.endswith("/mean")]
    (spread,) = [tensor for name, tensor in server.method_state.items() if name.endswith("/spread")]
    return mean, spread


# ---- statistics


def test_moments_are_torchs_class_by_class() -> None:
    features, labels = torch.randn(40, 5, dtype=torch.float64) * 3 + 7, torch.randint(0, 4, (40,))
    labels[0] = 5
    labels[labels == 3] = 2
    found = moments(features, labels, 6)
    for label in range(6):
        own = features[labels == label]
        assert found.counts[label] == len(own)
        torch.testing.assert_close(
            found.mean[label], own.mean(0) if len(own) else torch.zeros(5).double()
        )
        torch.testing.assert_close(
            found.variance[label], own.var(0) if len(own) > 1 else torch.zeros(5).double()
        )


def test_pooled_moments_are_those_of_the_concatenated_data() -> None:
    features, labels = torch.randn(60, 5, dtype=torch.float64) + 4, torch.randint(0, 4, (60,))
    labels[:20] = labels[:20].clamp_max(1)
    ends = [0, 20, 21, 33, 60]
    parts = [moments(features[a:b], labels[a:b], 4) for a, b in pairwise(ends)]
    for found, expected in zip(pooled(parts), moments(features, labels, 4), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spread", ["variance", "deviation"])
def test_a_rounds_statistics_equal_those_of_the_clients_data_together(spread: str) -> None:
    """One batch of all its data a client, and merging by counts: features are those of the received low level."""
    whole = (
        "training.steps=1",
        "training.batch_size=1437",
        "method.merge=counts",
        f"method.spread={spread}",
    )
    federation, server = after(1, *MLP, *LAST, *whole)
    start = federation.initial_state()
    model = federation.split.build("mlp2")
    model.load_state_dict(start.state)
    rows = torch.cat(
        [torch.from_numpy(federation.partition.of(client)) for client in federation.sample(1)]
    )
    images, labels = federation.engine.clients.data.batch(rows)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = moments(run(chain_of(model)[:1], images), labels, 10)
    mean, held = statistics(server)
    seen = expected.counts > 0
    torch.testing.assert_close(mean[seen], expected.mean[seen], rtol=1e-4, atol=1e-5)
    variance = held if spread == "variance" else held.square()
    torch.testing.assert_close(variance[seen], expected.variance[seen], rtol=1e-3, atol=1e-5)


def test_classes_that_nobody_had_keep_their_statistics() -> None:
    federation, server = after(
        1, *MLP, *LAST, "method.merge=counts", "training.steps=1", "training.batch_size=4"
    )
    before, now = statistics(federation.initial_state()), statistics(server)
    kept = [bool(torch.equal(one, other)) for one, other in zip(before[0], now[0], strict=True)]
    rows = [
        federation.engine.clients.plan(federation.job(server, 1, c)).rows[0]
        for c in federation.sample(1)
    ]  # type: ignore[attr-defined]
    labels = set(torch.from_numpy(federation.dataset.train.targets)[torch.cat(rows)].tolist())
    assert kept == [label not in labels for label in range(10)] and any(kept) and not all(kept)


def observe(
    federation: Federation, learner: Learner, features: list[list[float]], labels: list[int]
) -> None:
    client_of(federation).observe(learner, torch.tensor(features), torch.tensor(labels))


def test_equation_6_by_hand() -> None:
    federation, learner = first_learner(*MLP, "model.mlp.hidden=1", "method.beta_m=0.75")
    mean, spread = learner.scratch[SCRATCH]["mean"], learner.scratch[SCRATCH]["spread"]
    start = mean.clone()
    assert float(start.min()) >= 0 and float(start.max()) < 1
    assert spread.flatten().tolist() == pytest.approx([0.01] * 10)
    observe(federation, learner, [[1.0], [3.0], [5.0]], [2, 2, 4])
    assert float(mean[2]) == pytest.approx(0.75 * float(start[2]) + 0.25 * 2)
    assert float(spread[2]) == pytest.approx(0.75 * 0.01 + 0.25 * 2)
    assert float(mean[4]) == pytest.approx(0.75 * float(start[4]) + 0.25 * 5)
    assert float(spread[4]) == pytest.approx(0.01), "one example has no deviation"
    others = [label for label in range(10) if label not in (2, 4)]
    assert torch.equal(mean[others], start[others])
    observe(federation, learner, [[7.0]], [2])
    assert float(mean[2]) == pytest.approx(0.75 * (0.75 * float(start[2]) + 0.5) + 0.25 * 7)
    assert learner.scratch[SCRATCH]["counts"].tolist() == [0, 0, 3, 0, 1, 0, 0, 0, 0, 0]
    assert torch.equal(learner.broadcast[f"{OWN}mean"], start), (
        "what was received stays to be drawn from"
    )


def test_without_momentum_statistics_are_the_last_batchs_and_deviations_are_capped() -> None:
    federation, learner = first_learner(
        *MLP, "model.mlp.hidden=1", "method.variant=official", "method.beta_m=0"
    )
    observe(federation, learner, [[1.0], [3.0]], [2, 2])
    observe(federation, learner, [[5.0], [5.04]], [2, 2])
    assert float(learner.scratch[SCRATCH]["mean"][2]) == pytest.approx(5.02)
    assert float(learner.scratch[SCRATCH]["spread"][2]) == pytest.approx(0.04 / 2**0.5, rel=1e-3)
    observe(federation, learner, [[1.0], [3.0]], [2, 2])
    assert float(learner.scratch[SCRATCH]["spread"][2]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("dimension", "weight"),
    [
        (64 * 32 * 32, 1.0),
        (128 * 16 * 16, 1.0),
        (256 * 8 * 8, 1.0),
        (512, 0.1024),
        (4096, 0.8192),
    ],
    ids=["layer1", "layer2", "layer3", "layer4 pooled, and VGG11", "VGG9"],
)
def test_the_released_code_weighs_a_batch_by_the_length_of_its_features(
    dimension: int, weight: float
) -> None:
    assert 1 - FedImproSettings(variant="official").momentum(dimension) == pytest.approx(weight)
    assert FedImproSettings().momentum(dimension) == 0.9, "the paper's momentum is a constant"


def test_the_released_moving_average_by_hand() -> None:
    """Two values per feature: a new batch has the weight 2 / 5000, and the estimate is limited to 0.1."""
    federation, learner = first_learner(*MLP, "model.mlp.hidden=2", "method.variant=official")
    mean, spread = learner.scratch[SCRATCH]["mean"], learner.scratch[SCRATCH]["spread"]
    mean.fill_(0.5)
    spread.fill_(0.05)
    observe(federation, learner, [[10.5, 0.5], [30.5, 0.5]], [2, 2])
    deviation = 20 / 2**0.5
    assert mean[2].tolist() == pytest.approx([0.5 + 20 * 0.0004, 0.5])
    expected = [0.05 + 0.0004 * (deviation - 0.05), 0.05 * 0.9996]
    assert spread[2].tolist() == pytest.approx(expected), "the batch's deviation is not limited"
    observe(federation, learner, [[0.0, 0.5], [10_000.0, 0.5]], [2, 2])
    assert float(spread[2, 0]) == pytest.approx(0.1)
    assert spread[3].tolist() == pytest.approx([0.05, 0.05])


def test_the_momentum_is_a_number_or_the_released_rule() -> None:
    problem = refused("method.name=fedimpro", "method.beta_m=1")
    assert problem == ('method.beta_m = 1: should be a number from 0 to below 1, or "dimension".')


def test_equation_7_by_hand() -> None:
    federation = federation_of(*MLP, "model.mlp.hidden=1", "method.beta_g=0.75")
    server = federation.initial_state()
    before, _ = statistics(server)

    def sent(value: float) -> State:
        return {
            f"{OWN}mean": torch.full((10, 1), value),
            f"{OWN}spread": torch.full((10, 1), value / 10),
        }

    updates = [
        ClientUpdate(client=c, part={}, delta={}, size="mlp2", payload=sent(v))
        for c, v in ((0, 2.0), (3, 6.0))
    ]
    after_round = federation.method.server.update(server.method_state, server.state, updates)
    mean, spread = (after_round[name] for name in server.method_state)
    torch.testing.assert_close(mean, 0.75 * before + 0.25 * 4)
    torch.testing.assert_close(spread, torch.full((10, 1), 0.75 * 0.01 + 0.25 * 0.4))


@pytest.mark.parametrize("degree", [0.3, 2.0])
def test_noise_on_what_is_sent_has_the_scale_asked_for(degree: float) -> None:
    federation, learner = first_learner(*MLP, "model.mlp.hidden=400", f"method.noise={degree}")
    torch.manual_seed(0)
    payload, _ = federation.method.client.finish(learner)
    for name in ("mean", "spread"):
        noise = payload[f"{OWN}{name}"] - learner.scratch[SCRATCH][name]
        assert (
            float(noise.std()) == pytest.approx(degree, rel=0.05)
            and abs(float(noise.mean())) < 0.1 * degree
        )


# ---- what is drawn


def test_drawn_features_follow_their_class() -> None:
    torch.manual_seed(0)
    mean, deviation = (
        torch.tensor([[0.0, 5.0], [-3.0, 2.0]]),
        torch.tensor([[1.0, 0.5], [0.0, 2.0]]),
    )
    labels = torch.tensor([0, 1]).repeat(20_000)
    drawn = draw(mean, deviation, labels)
    for label in (0, 1):
        own = drawn[labels == label]
        torch.testing.assert_close(own.mean(0), mean[label], rtol=0, atol=0.05)
        torch.testing.assert_close(own.std(0), deviation[label], rtol=0.02, atol=1e-6)


def test_labels_are_as_asked() -> None:
    labels = torch.tensor([3, 3, 7, 1])
    assert repeated(labels, 4).tolist() == [3, 3, 7, 1]
    assert repeated(labels, 6).tolist() == [3, 3, 7, 1, 3, 3] and repeated(labels, 2).tolist() == [
        3,
        3,
    ]
    assert balanced(torch.zeros(128), 10, 128).bincount().tolist() == [13] * 10, (
        "130 for a batch of 128"
    )
    assert balanced(torch.zeros(128), 100, 128).bincount().tolist() == [2] * 100


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), [5, 5, 2]),
        (("method.ratio=2",), [5, 5, 2, 5, 5, 2]),
        (("method.ratio=0.3",), [5]),
        (("method.labels=balanced",), list(range(10))),
        (("method.labels=balanced", "method.ratio=4"), [*range(10), *range(10)]),
    ],
)
def test_as_many_features_are_drawn_as_asked(
    settings: tuple[str, ...], expected: list[int]
) -> None:
    federation = federation_of(*MLP, *settings)
    labels = torch.tensor([5, 5, 2])
    assert client_of(federation).drawn_targets(labels).tolist() == expected


@pytest.mark.parametrize("source", ["received", "own"])
def test_where_features_are_drawn_from(source: str) -> None:
    federation, learner = first_learner(*MLP, f"method.source={source}")
    learner.broadcast[f"{OWN}mean"].fill_(1.0)
    learner.scratch[SCRATCH]["mean"].fill_(2.0)
    learner.broadcast[f"{OWN}spread"].zero_()
    learner.scratch[SCRATCH]["spread"].zero_()
    drawn = client_of(federation).drawn_features(learner, torch.tensor([1, 2]), torch.zeros(2, 6))
    assert drawn.unique().tolist() == [1.0 if source == "received" else 2.0]


def test_a_variance_that_noise_made_negative_is_none() -> None:
    federation, learner = first_learner(*MLP)
    learner.broadcast[f"{OWN}spread"].fill_(-4.0)
    drawn = client_of(federation).drawn_features(learner, torch.tensor([1]), torch.zeros(1, 6))
    assert torch.equal(drawn[0], learner.broadcast[f"{OWN}mean"][1])


# ---- what the round's record has of it


@pytest.mark.parametrize("spread", ["variance", "deviation"])
def test_the_record_has_loss_and_weight_the_shared_deviation_and_how_far_means_are_apart(
    spread: str,
) -> None:
    federation = federation_of(
        *MLP, "model.mlp.hidden=1", f"method.spread={spread}", "method.weight=0.25"
    )
    held = {f"{OWN}mlp2/mean": torch.zeros(10, 1), f"{OWN}mlp2/spread": torch.full((10, 1), 4.0)}

    def sent(value: float, loss: float) -> State:
        numbers = {DRAWN_LOSS: torch.tensor(loss), WEIGHT: torch.tensor(0.25)}
        return {
            f"{OWN}mean": torch.full((10, 1), value),
            f"{OWN}spread": torch.ones(10, 1),
            **numbers,
        }

    updates = [
        ClientUpdate(client=c, part={}, delta={}, size="mlp2", payload=sent(v, v))
        for c, v in ((0, 2.0), (3, 6.0))
    ]
    found = {
        name: float(value)
        for name, value in federation.method.server.metrics(held, updates).items()
    }
    deviation = 2.0 if spread == "variance" else 4.0
    assert found == pytest.approx(
        {"drawn_loss": 4.0, "weight": 0.25, "deviation": deviation, "means_apart": 2.0}
    )


@pytest.mark.parametrize("name", ["fedimpro", "fedimpro-scaffold", "fedimpro-nova"])
def test_a_rounds_drawn_loss_is_the_mean_over_steps_and_clients(name: str) -> None:
    federation, server = after(1, *MLP, "training.steps=3", name=name)
    _, record = federation.run_round(server)
    assert record.metrics.keys() == {
        f"method/{name}" for name in ("drawn_loss", "weight", "deviation", "means_apart")
    }
    assert 0.5 < record.metrics["method/drawn_loss"] < 5 and record.metrics["method/weight"] == 1
    federation = federation_of(*MLP, "method.weight=0", name=name)
    _, nothing = federation.run_round(federation.initial_state())
    assert nothing.metrics.keys() == {"method/deviation", "method/means_apart"}


# ---- who learns from it


def gradients(federation: Federation, learner: Learner, images: Tensor, labels: Tensor) -> State:
    learner.inputs, learner.targets = images, labels
    learner.backward(federation.method.client.loss(learner))
    return {name: grad.clone() for name, grad in learner.grads.items()}


@pytest.mark.parametrize("sizes", ["['mlp3']", "['resnet10']"])
def test_the_low_level_gets_no_gradient_from_drawn_features(sizes: str) -> None:
    found = []
    separate = "method.normalization=separate"
    for weight in (0, 5):
        federation, learner = first_learner(
            f"model.sizes={sizes}", *SGD, separate, f"method.weight={weight}"
        )
        images = learner.first_inputs(16)
        found.append(gradients(federation, learner, images, torch.arange(16) % 10))
    low, high = client_of(federation).cut.levels(chain_of(learner.model), learner.size)
    assert len(owned(learner.model, low)) > 1 and len(owned(learner.model, high)) > 1
    for name in owned(learner.model, low):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-6)
    for name in owned(learner.model, high):
        assert not torch.allclose(found[0][name], found[1][name], rtol=1e-2, atol=1e-6), name


def test_theorem_4_2s_factor() -> None:
    """Features drawn alike by all clients shrink the high level's gradient variance by N^2 / (N + N')^2.

    Class means without deviation: what is drawn is the same everywhere, and each mean over real and drawn features is
    taken exactly. The low level's variance shrinks by nothing but the mean's own division, which is taken out.
    """
    clients = {}
    for ratio in (0, 1, 3):
        settings = [
            "method.labels=balanced",
            "method.average=true",
            f"method.weight={ratio}",
            "method.ratio=1",
        ]
        federation, learner = first_learner(*MLP, *settings)
        learner.broadcast[f"{OWN}spread"].zero_()
        found = []
        for client in range(4):
            rows = torch.from_numpy(federation.partition.of(client))
            images, labels = federation.engine.clients.data.batch(rows)  # type: ignore[attr-defined]
            found.append(gradients(federation, learner, images, labels))
        clients[ratio] = gradient_variance(found, federation.partition.sizes[:4].tolist())
    for ratio in (1, 3):
        factor = 1 / (1 + ratio) ** 2
        assert clients[ratio] == pytest.approx(
            {layer: factor * v for layer, v in clients[0].items()}, rel=1e-4
        )
    assert all(value > 1e-3 for value in clients[0].values())


@pytest.mark.parametrize("way", ["joint", "separate"])
def test_whose_features_move_running_statistics(way: str) -> None:
    _, plain = after(1, *SGD, "training.steps=1", name="fedavg")
    _, other = after(1, *SGD, "training.steps=1", f"method.normalization={way}")
    low = [
        name
        for name in plain.state
        if "running_mean" in name and name.startswith(("bn1", "layer1", "layer2"))
    ]
    high = [
        name
        for name in plain.state
        if "running_mean" in name and name.startswith(("layer3", "layer4"))
    ]
    assert low and high
    assert all(torch.equal(plain.state[name], other.state[name]) for name in low)
    moved = [not torch.equal(plain.state[name], other.state[name]) for name in high]
    assert all(moved) if way == "joint" else not any(moved)


# ---- FedAvg, and others, where nothing is drawn


@pytest.mark.parametrize("optimizer", [(), SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize(
    ("name", "plain"),
    {
        "fedimpro": "fedavg",
        "fedimpro-prox": "fedprox",
        "fedimpro-scaffold": "scaffold",
        "fedimpro-nova": "fednova",
        "fedimpro-dyn": "feddyn",
    }.items(),
)
def test_weight_zero_is_the_method_below_bit_for_bit(
    name: str, plain: str, optimizer: tuple[str, ...]
) -> None:
    _, expected = after(2, *optimizer, name=plain)
    _, found = after(2, *optimizer, "method.weight=0", name=name)
    assert same_bits(found.state, expected.state)
    assert same_bits(
        {n: t for n, t in found.method_state.items() if not n.startswith(OWN)},
        expected.method_state,
    )
    assert any(n.startswith(OWN) for n in found.method_state)


def test_a_loss_by_hand() -> None:
    federation, learner = first_learner(*MLP, "method.weight=0.5", "method.average=true")
    learner.broadcast[f"{OWN}spread"].zero_()
    images, labels = learner.first_inputs(4), torch.tensor([1, 1, 4, 0])
    model: Any = learner.model
    real = nn.functional.cross_entropy(model(images), labels)
    logits = run(chain_of(model)[1:], learner.broadcast[f"{OWN}mean"][labels])
    drawn = nn.functional.cross_entropy(logits, labels)
    learner.inputs, learner.targets = images, labels
    loss = federation.method.client.loss(learner)
    assert loss.item() == pytest.approx((real.item() + 0.5 * drawn.item()) / 1.5, rel=1e-5)


def test_the_weight_grows_with_the_epochs_as_released() -> None:
    official = FedImproSettings(variant="official")
    assert [official.weight_at(epoch) for epoch in (0, 250, 500, 1000)] == [0, 0.5, 1, 2]
    capped = FedImproSettings(variant="official", weight_max=1.0)
    assert [capped.weight_at(epoch) for epoch in (250, 1000)] == [0.5, 1]
    assert FedImproSettings(weight=0.3).weight_at(700) == 0.3
    federation = federation_of(*MLP, "method.variant=official", "training.epochs=5")
    learner = seated(federation, federation.job(federation.initial_state(), 51, 0))
    assert float(learner.scratch[SCRATCH]["weight"]) == pytest.approx(50 * 5 / 500)


# ---- where models are cut, and who shares statistics


def test_sizes_with_features_of_one_shape_share_statistics() -> None:
    federation = federation_of()
    assert list(federation.initial_state().method_state) == [
        f"{OWN}layer2-8x4x4/mean",
        f"{OWN}layer2-8x4x4/spread",
    ]
    apart = federation_of("method.share=size")
    assert {name.split("/")[1] for name in apart.initial_state().method_state} == {
        "resnet10",
        "resnet14",
        "resnet18",
    }


def test_families_have_statistics_of_their_own() -> None:
    sizes = "model.sizes=['mlp2','cnn','vgg9']"
    federation, server = after(2, sizes, "split.name=grouped", *SGD, "training.steps=1")
    assert {name.split("/")[1] for name in server.method_state} == {
        "layer0-64",
        "conv2-64x2x2",
        "block2-128x2x2",
    }
    moved = [
        not torch.equal(t, federation.initial_state().method_state[n])
        for n, t in server.method_state.items()
    ]
    assert all(moved)


@pytest.mark.parametrize(
    ("size", "cut", "length"),
    [
        ("resnet18", "layer1", 64 * 32 * 32),
        ("resnet18", "", 128 * 16 * 16),
        ("resnet18", "layer3", 256 * 8 * 8),
        ("resnet18", "pool", 512),
        ("resnet50", "layer2", 512 * 16 * 16),
        ("vgg11", "block5", 512),
    ],
)
def test_cuts_have_the_lengths_of_the_released_code(size: str, cut: str, length: int) -> None:
    settings = ["data.transform.resize=32", "split.name=homogeneous", f"method.cut={cut}"]
    if size.startswith("resnet"):
        settings.append("model.resnet={stem='cifar', width=1.0}")
    federation = federation_of(f"model.sizes=['{size}']", *settings)
    assert client_of(federation).cut.shapes[size].numel() == length


def test_a_stage_that_a_size_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        MotleyError,
        match=r"method\.cut = 'layer9': model 'resnet10': unknown stage .*layer1, layer2",
    ):
        federation_of("method.cut=layer9")
    with pytest.raises(MotleyError, match=r"'head'"):
        federation_of("method.cut=head")


# ---- presets


def test_presets_fix_every_difference_and_a_field_can_differ_from_them(tmp_path: Any) -> None:
    official = load_config(preset="fedimpro-cifar10").method
    assert isinstance(official, FedImproSettings)
    assert (official.beta_m, official.beta_g, official.spread, official.deviation_max) == (
        "dimension",
        0,
        "deviation",
        0.1,
    )
    assert (official.labels, official.source, official.ramp, official.weight_max) == (
        "balanced",
        "own",
        500,
        "off",
    )
    paper = load_config(preset="fedimpro-cifar10", overrides=["method.variant=paper"]).method
    assert paper == FedImproSettings()
    assert (paper.labels, paper.source, paper.ramp, paper.spread) == (
        "batch",
        "received",
        0,
        "variance",
    )
    saved = written(
        tmp_path, load_config(preset="fedimpro-cifar10", overrides=["method.ratio=2"]).to_toml()
    )
    assert read_resolved(saved).method == FedImproSettings(variant="official", ratio=2)
    assert load_config(saved, overrides=["method.variant=paper"]).method == FedImproSettings()
    again = load_config(saved, overrides=["method.variant=official", "method.cut=layer1"]).method
    assert again == FedImproSettings(variant="official", ratio=2, cut="layer1")
    assert "method.deviation_max = -1" in refused("method.name=fedimpro", "method.deviation_max=-1")
