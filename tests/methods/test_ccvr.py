"""CCVR: pooled statistics, virtual features, the calibrated layer, and where it is FedAvg."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.randomness import key
from motley.engine.base import Job
from motley.federation import Federation
from motley.methods.base import Collection
from motley.methods.ccvr import CCVRSettings, draw, pooled, virtual_numbers
from motley.models.stages import features
from motley.server.recalibration import Recalibrate
from motley.server.state import ServerState
from tests.methods.turns import after, federation_of, same_bits

LAST = ("training.rounds=2", "evaluation.every=2", "data.partition.alpha=0.1")
CLASSES = 10


def collected(federation: Federation, server: ServerState) -> list[Collection]:
    """Return the answers of all clients about the server's model."""
    jobs = []
    for client, size in enumerate(federation.sizes):
        part = federation.split.part(size)
        state = {local: server.state[piece.name] for local, piece in part.items()}
        jobs.append(Job(server.round_number, client, size, state))
    return [one for one in federation.engine.collect(jobs) if isinstance(one, Collection)]


def features_of(federation: Federation, server: ServerState, client: int) -> tuple[Tensor, Tensor]:
    """Return the features of a client's examples in the server's model, and their labels."""
    size = federation.sizes[client]
    model = federation.split.build(size)
    part = federation.split.part(size)
    model.load_state_dict({local: server.state[piece.name] for local, piece in part.items()})
    rows = federation.partition.of(client)
    images = torch.from_numpy(federation.dataset.train.inputs[rows]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        return features(model.eval(), images), torch.from_numpy(
            federation.dataset.train.targets[rows]
        )


# ---- statistics


def test_clients_send_mean_and_covariance_of_their_features() -> None:
    federation, server = after(1, name="ccvr")
    for answer in collected(federation, server):
        z, labels = (t.numpy() for t in features_of(federation, server, answer.client))
        assert answer.values["classes"].tolist() == sorted(set(labels.tolist()))
        for row, label in enumerate(answer.values["classes"].tolist()):
            own = z[labels == label]
            assert answer.values["counts"][row] == len(own)
            np.testing.assert_allclose(answer.values["mean"][row], own.mean(0), atol=1e-5)
            covariance = np.cov(own.T) if len(own) > 1 else np.zeros((z.shape[1],) * 2)
            np.testing.assert_allclose(answer.values["covariance"][row], covariance, atol=1e-4)


def test_pooled_statistics_are_those_of_all_features_together() -> None:
    """Also of classes that a client lacks, has once, or that nobody has."""
    random = np.random.default_rng(1)
    answers, everything = [], {label: [] for label in range(5)}
    for client, numbers in enumerate(({0: 30, 1: 1, 3: 4}, {0: 2, 1: 9}, {1: 5, 3: 1})):
        classes, counts, means, covariances = [], [], [], []
        for label, number in numbers.items():
            z = random.normal(size=(number, 6)) @ random.normal(size=(6, 6)) + 3 * client + label
            everything[label].append(z)
            classes.append(label)
            counts.append(number)
            means.append(z.mean(0))
            covariances.append(np.cov(z.T) if number > 1 else np.zeros((6, 6)))
        values = {"classes": classes, "counts": counts, "mean": means, "covariance": covariances}
        answers.append({name: torch.from_numpy(np.array(v)) for name, v in values.items()})
    result = pooled(answers, classes=5, width=6)
    assert result.counts.tolist() == [32, 15, 0, 5, 0]
    for label, parts in everything.items():
        if parts:
            z = np.concatenate(parts)
            np.testing.assert_allclose(result.mean[label], z.mean(0), rtol=1e-10)
            np.testing.assert_allclose(result.covariance[label], np.cov(z.T), rtol=1e-9, atol=1e-9)


def test_virtual_features_have_the_mean_and_covariance_they_are_drawn_with() -> None:
    z = torch.randn(2, 40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    answers = [
        {
            "classes": torch.tensor([0, 2]),
            "counts": torch.tensor([40, 40]),
            "mean": z.mean(1) + 1,
            "covariance": torch.stack([z[0].t().cov(), torch.zeros(3, 3, dtype=torch.float64)]),
        }
    ]
    gaussians = pooled(answers, classes=3, width=3)
    x, labels = draw(gaussians, [40_000, 0, 7], torch.Generator().manual_seed(2))
    assert labels.bincount().tolist() == [40_000, 0, 7]
    torch.testing.assert_close(x[labels == 0].mean(0), z[0].mean(0) + 1, rtol=0, atol=0.03)
    torch.testing.assert_close(x[labels == 0].t().cov(), z[0].t().cov(), rtol=0, atol=0.05)
    torch.testing.assert_close(x[labels == 2], (z[1].mean(0) + 1).expand(7, 3), rtol=0, atol=1e-5)


def test_numbers_of_virtual_features() -> None:
    counts = torch.tensor([60.0, 0.0, 20.0, 0.1])
    assert virtual_numbers(counts, CCVRSettings(virtual=20)) == [60, 0, 20, 1]
    assert virtual_numbers(counts, CCVRSettings(virtual=20, balance="equal")) == [20, 0, 20, 20]


# ---- the calibration


def test_the_last_layer_trains_on_virtual_features_with_the_gradient_of_cross_entropy() -> None:
    settings = ("method.virtual=8", "method.calibration_epochs=2", "method.calibration_batch=9")
    federation, server = after(1, "model.sizes=['mlp1']", *settings, name="ccvr")
    answers = collected(federation, server)
    gaussians = pooled([one.values for one in answers], CLASSES, 64)
    numbers = virtual_numbers(gaussians.counts, federation.config.method)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(key(1, "virtual features", 1, "mlp1"))
    x, labels = draw(gaussians, numbers, random)
    x = x.float()
    weight, bias = server.state["head.weight"].clone(), server.state["head.bias"].clone()
    speed_w, speed_b = torch.zeros_like(weight), torch.zeros_like(bias)
    random = torch.Generator().manual_seed(key(1, "calibration", 1, "head.weight"))
    for _ in range(2):
        for rows in torch.randperm(len(x), generator=random).split(9):
            error = (x[rows] @ weight.t() + bias).softmax(1)
            error[torch.arange(len(rows)), labels[rows]] -= 1
            speed_w = 0.9 * speed_w + error.t() @ x[rows] / len(rows)
            speed_b = 0.9 * speed_b + error.mean(0)
            weight, bias = weight - 0.01 * speed_w, bias - 0.01 * speed_b
    _, state = federation.method.server.apply_collection({}, server.state, answers)
    torch.testing.assert_close(state["head.weight"], weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state["head.bias"], bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "split"),
    [("ccvr", "depth"), ("ccvr", "grouped"), ("ccvr-prox", "depth"), ("ccvr-moon", "depth")],
)
def test_only_last_layers_change_after_the_last_round(name: str, split: str) -> None:
    base = {"ccvr": "fedavg", "ccvr-prox": "fedprox", "ccvr-moon": "moon"}[name]
    settings = (*LAST, f"split.name={split}")
    federation, plain = after(2, *settings, name=base)
    _, other = after(2, *settings, name=name)
    changed = {n for n in plain.state if not torch.equal(plain.state[n], other.state[n])}
    prefixes = [""] if split == "depth" else [f"{size}/" for size in federation.split.sizes]
    assert changed == {f"{p}fc.{tensor}" for p in prefixes for tensor in ("weight", "bias")}
    if split == "depth":
        before, now = (federation.evaluate(server.state) for server in (plain, other))
        assert sum(s.loss for s in now.values()) < sum(s.loss for s in before.values())


def test_no_virtual_features_are_fedavg_bit_for_bit() -> None:
    _, plain = after(2, *LAST, name="fedavg")
    _, other = after(2, *LAST, "method.virtual=0", name="ccvr")
    assert same_bits(other.state, plain.state)


def test_a_moving_average_is_calibrated_and_training_goes_on_from_the_other_layer() -> None:
    settings = (*LAST, "server.ema_decay=0.5")
    _, plain = after(2, *settings, name="fedavg")
    _, other = after(2, *settings, "method.every=1", name="ccvr")
    assert same_bits(other.state, plain.state)
    assert not torch.equal(other.model["fc.weight"], plain.model["fc.weight"])


def test_when_clients_are_asked() -> None:
    federation = federation_of("training.rounds=7", "method.every=3", name="ccvr")
    asked = [len(federation.method.server.collection_clients(number)) for number in range(1, 8)]
    assert asked == [0, 0, 6, 0, 0, 6, 6]


def test_statistics_are_recalibrated_before_features_are_collected() -> None:
    """Features depend on them."""
    recalibrated = "server.statistics.name=recalibrate"
    stages = [type(stage) for stage in federation_of(recalibrated, name="ccvr").collections]
    assert stages[0] is Recalibrate and len(stages) == 2


@pytest.mark.parametrize("name", ["ccvr", "spherefed"])
def test_features_that_are_not_finite_leave_the_last_layer_alone(name: str) -> None:
    federation, server = after(1, name=name)
    broken = {n: t * float("nan") for n, t in server.state.items() if t.is_floating_point()}
    answers = collected(federation, replace(server, state={**server.state, **broken}))
    _, state = federation.method.server.apply_collection(server.method_state, server.state, answers)
    assert same_bits(state, server.state)


# ---- refusals


def test_answers_that_are_no_statistics_are_refused() -> None:
    federation, server = after(1, name="ccvr")
    answer = collected(federation, server)[0].values
    for name, value, reason in (
        ("mean", answer["mean"][:, 1:], "'mean' has shape"),
        ("covariance", answer["covariance"][:1], "'covariance' has shape"),
        ("counts", answer["counts"] - 1000, "without examples"),
        ("classes", answer["classes"] * 0, "named twice"),
        ("classes", answer["classes"] + 9, "a class is unknown"),
    ):
        with pytest.raises(ValueError, match=reason):
            pooled([{**answer, name: value}], CLASSES, answer["mean"].shape[1])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("split.name=width", "split.rates=[1,0.5]", "model.sizes=['resnet14']"),
            "computes whole last layers, and .* holds a slice of 'fc.weight'",
        ),
        (
            ("privacy.clip=1", "privacy.noise=1", "model.sizes=['mlp1']"),
            r"this method does more with its clients than that \(collection\)",
        ),
    ],
    ids=["width", "privacy"],
)
def test_settings_it_cannot_work_with_are_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(MotleyError, match=reason):
        federation_of(*overrides, name="ccvr")
