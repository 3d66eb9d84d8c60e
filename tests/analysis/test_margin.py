"""Worst-case margin and generalization contribution, where they have closed forms."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from motley.analysis import ANALYSES
from motley.analysis.assignment import assign, exact_wasserstein
from motley.analysis.contribution import (
    ALL,
    NUMBERS,
    Labelled,
    class_weights,
    label_term,
    theorem_terms,
)
from motley.analysis.margin import GlobalMarginSettings, MarginSettings, margins, mean_margin
from motley.analysis.replay import examples_at, global_model, model_of, open_run, train_next_round
from motley.models.stages import chain_of
from motley.models.stages import run as run_stages
from tests.cli.conftest import call
from tests.report.conftest import small_run


def linear_margins(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the exact margins of a linear model: the distance to the nearest half-space."""
    distances = []
    for row, label in zip(x, y.tolist(), strict=True):
        nearest = math.inf
        for other in range(len(weight)):
            if other != label:
                normal = weight[label] - weight[other]
                lead = float(normal @ row + bias[label] - bias[other])
                nearest = min(nearest, max(lead, 0.0) / float(normal.norm()))
        distances.append(nearest)
    return torch.tensor(distances)


# ---- margins


def test_the_margin_of_two_classes_by_hand() -> None:
    """Class 1 is right of x = 0. The last point is misclassified, so its margin is 0."""
    points = torch.tensor([[3.0, 5.0], [-2.0, 1.0], [0.5, 7.0], [-4.0, 0.0]])
    labels = torch.tensor([1, 0, 1, 1])

    def classify(x: Tensor) -> Tensor:
        return torch.stack([-3 * x[:, 0], 3 * x[:, 0]], 1)

    distances = margins(classify, points, labels)
    assert distances.tolist() == pytest.approx([3.0, 2.0, 0.5, 0.0], rel=1e-4)
    assert mean_margin(distances) == (pytest.approx(5.5 / 4, rel=1e-4), 0.0)
    weighted, _ = mean_margin(distances, torch.tensor([1.0, 1.0, 0.0, 2.0]))
    assert weighted == pytest.approx(5 / 4, rel=1e-4)


def test_margins_of_linear_models_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    x = 3 * torch.randn(300, 6)
    y = torch.randint(5, (300,))
    y[:200] = model(x[:200]).argmax(1)
    expected = linear_margins(model.weight.detach(), model.bias.detach(), x, y)
    assert torch.allclose(margins(model, x, y), expected, rtol=1e-3, atol=1e-4)
    assert (expected == 0).any() and (expected > 0).any()


def test_the_margin_of_a_circle() -> None:
    """Class 1 is outside the unit circle: a point's margin is its distance to the circle."""
    radii = torch.tensor([0.2, 0.9, 1.5, 3.0])
    angles = torch.tensor([0.3, 2.0, 4.0, 5.5])
    points = torch.stack([radii * angles.cos(), radii * angles.sin()], 1)

    def classify(x: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(x)), x.square().sum(1)], 1)

    labels = (radii > 1).long()
    assert torch.allclose(margins(classify, points, labels), (radii - 1).abs(), atol=1e-3)


def test_examples_without_a_misclassified_point_are_counted_and_left_out() -> None:
    def classify(x: Tensor) -> Tensor:
        return torch.stack([x[:, 0].clamp(min=0), torch.full((len(x),), -1.0)], 1)

    distances = margins(classify, torch.tensor([[2.0], [3.0]]), torch.tensor([0, 1]))
    assert distances[0].isnan() and distances[1] == 0
    assert mean_margin(distances) == (0.0, 0.5)


# ---- the distance


def test_the_assignment_is_the_best_permutation() -> None:
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 6):
        for _ in range(5):
            costs = random.random((count, count))
            best = min(
                sum(costs[row, column] for row, column in enumerate(permutation))
                for permutation in itertools.permutations(range(count))
            )
            columns = assign(costs)
            assert sorted(columns) == list(range(count))
            assert costs[np.arange(count), columns].sum() == pytest.approx(best)


def test_the_assignment_equals_scipys() -> None:
    from scipy.optimize import linear_sum_assignment

    costs = np.random.default_rng(1).integers(0, 30, (40, 40)).astype(float)
    rows, columns = linear_sum_assignment(costs)
    assert costs[np.arange(40), assign(costs)].sum() == costs[rows, columns].sum()


def test_the_exact_distance_of_a_shift_is_its_length() -> None:
    points = torch.randn(20, 3)
    moved = (points + torch.tensor([3.0, 0.0, 4.0]))[torch.randperm(20)]
    assert exact_wasserstein(points, moved) == pytest.approx(5.0, rel=1e-5)


# ---- the contribution


def boundary_at(x: float, points: list[float], labels: list[int]) -> Labelled:
    """Return examples in one dimension, for a model that says class 1 to the right of `x`."""
    inputs = torch.tensor(points)[:, None]
    answers = torch.tensor(labels)

    def classify(values: Tensor) -> Tensor:
        return torch.cat([x - values, values - x], 1)

    return Labelled(inputs, answers, margins(classify, inputs, answers))


def test_the_contribution_and_its_bound_by_hand() -> None:
    """The local update moves the boundary from 0 to 1.

    Others: class 1 at 3 and 0.5, class 0 at -1. Their margins are 2, 0 (misclassified) and 2; at
    the received model 3, 0.5 and 1. The client: class 1 at 2, class 0 at 0 and at -1, so its
    training margin is (1 + 1 + 2) / 3. Test: class 1 at 4, class 0 at -2. Weighted as the client's
    classes, 1/3 and 2/3, the margin is 3 / 3 + 2 * 3 / 3 = 3.
    """
    others_points, others_labels = [3.0, 0.5, -1.0], [1, 1, 0]
    terms = theorem_terms(
        received=boundary_at(0, others_points, others_labels),
        training=boundary_at(1, [2.0, 0.0, -1.0], [1, 0, 0]),
        others=boundary_at(1, others_points, others_labels),
        test=boundary_at(1, [4.0, -2.0], [1, 0]),
        classes=2,
    )
    values = dict(zip(NUMBERS, terms, strict=True))
    # One example per class is compared: 2 with 3 and 0 with -1. Both distances are 1.
    training, own, distance = 4 / 3, 3.0, 1.0
    # Margins per class: others 2 and 1 (class 0, 1), own 1.5 and 1. Frequencies of class 0: 2/3 of
    # the client's examples, 1/3 of the others'.
    delta = (2 / 3 * 2 + 1 / 3 * 1) - (1 / 3 * 2 + 2 / 3 * 1)
    gamma = (1 / 3 * 1.5 + 2 / 3 * 1) - (2 / 3 * 1.5 + 1 / 3 * 1)
    assert values == pytest.approx(
        {
            "contribution": 4 / 3,
            "received": 4.5 / 3,
            "training margin": training,
            "own margin": own,
            "distance": distance,
            "label term": max(delta, gamma),
            "bound": training - abs(own - training) - 2 * distance,
            "not found": 0.0,
        },
        rel=1e-4,
    )


def test_the_bound_holds_for_a_linear_model_and_equal_label_distributions() -> None:
    """With D_m's own examples as its test data, all three terms of the theorem are exact."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    labels = torch.tensor([0, 1] * 20)

    def examples(shift: float) -> Labelled:
        centers = 2 * model.weight.detach()[labels] + shift
        points = centers + torch.randn(40, 2, generator=generator)
        return Labelled(points, labels, margins(model, points, labels))

    for shift in (0.0, 0.3, 1.0):
        own, others = examples(0.0), examples(shift)
        terms = theorem_terms(received=others, training=own, others=others, test=own, classes=2)
        values = dict(zip(NUMBERS, terms, strict=True))
        assert values["label term"] == pytest.approx(0, abs=1e-9)
        assert values["own margin"] == pytest.approx(values["training margin"])
        assert values["contribution"] >= values["bound"]


def test_weights_give_classes_the_frequencies_of_the_client() -> None:
    weights = class_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 2]), 3)
    total = weights.sum()
    assert float(weights[3] / total) == pytest.approx(2 / 3)


def test_nothing_in_common_gives_no_distance() -> None:
    one = boundary_at(0, [1.0], [1])
    other = boundary_at(0, [-1.0], [0])
    assert math.isnan(label_term(one, other))


# ---- runs


@pytest.fixture(scope="module")
def mlp_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    same = ("model.sizes=['mlp1']", "split.name=homogeneous", "method.name=fedavg")
    path = tmp_path_factory.mktemp("margin") / "run"
    return small_run(path, *same, "run.keep_checkpoints=2", "run.checkpoint_every=2")


def test_margins_of_a_run_before_the_head_are_those_of_a_linear_model(mlp_run: Path) -> None:
    settings = GlobalMarginSettings(layers=("s_out",), examples=10_000)
    findings = ANALYSES["margin"]([mlp_run], settings)
    with open_run(mlp_run) as (federation, servers):
        model = global_model(federation, servers[-1], "mlp1")
        test = federation.dataset.test
        images, labels = examples_at(federation, test, np.arange(len(test)))
        features = run_stages(chain_of(model)[:-1], images).detach()
    expected = linear_margins(
        model.head.weight.detach(), model.head.bias.detach(), features, labels
    )
    row = dict(zip(findings.columns, findings.rows[-1], strict=True))
    assert row["margin"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert row["accuracy"] == pytest.approx(float((expected > 0).float().mean()))
    assert [row[1] for row in findings.rows] == [2, 3]


def test_contributions_of_a_run_are_margins_on_the_other_clients_examples(mlp_run: Path) -> None:
    settings = MarginSettings(layers=("s_out",), examples=10_000)
    findings = ANALYSES["contribution"]([mlp_run], settings)
    rows = [dict(zip(findings.columns, row, strict=True)) for row in findings.rows]
    with open_run(mlp_run) as (federation, servers):
        trained = train_next_round(federation, servers[-1])
        total, mean = 0, 0.0
        for client in trained:
            model = model_of(federation, "mlp1", client.state)
            others = []
            for number in range(len(federation.partition)):
                if number != client.client:
                    others.append(federation.partition.of(number))
            images, labels = examples_at(
                federation, federation.dataset.train, np.concatenate(others)
            )
            features = run_stages(chain_of(model)[:-1], images).detach()
            weight, bias = model.head.weight.detach(), model.head.bias.detach()
            expected = float(linear_margins(weight, bias, features, labels).mean())
            (row,) = [r for r in rows if r["round"] == 3 and r["client"] == client.client]
            assert row["contribution"] == pytest.approx(expected, rel=1e-3)
            count = len(federation.partition.of(client.client))
            total, mean = total + count, mean + count * expected
    (overall,) = [row for row in rows if row["round"] == 3 and row["client"] == ALL]
    assert overall["contribution"] == pytest.approx(mean / total, rel=1e-3)


def test_the_cut_is_fedimpros_and_wrong_layers_are_named(mlp_run: Path, tmp_path: Path) -> None:
    answer = call("analyze", "margin", mlp_run, "--set", "layers=input,cut", "-o", tmp_path)
    assert answer.code == 0, answer.err
    rows = list(csv.DictReader((tmp_path / "margin.csv").open()))
    assert [row["layer"] for row in rows] == ["input", "layer0"] * 2
    assert "margins of mlp1, round 2, input" in answer.err
    wrong = call("analyze", "margin", mlp_run, "--set", "layers=layer7", "-o", tmp_path)
    assert wrong.code == 2
    assert "margin.layers = 'layer7': model 'mlp1': unknown stage 'layer7'." in wrong.err
    assert "Allowed: input, layer0, s_out." in wrong.err
    wrong = call("analyze", "contribution", mlp_run, "--set", "layer=input", "-o", tmp_path)
    assert "contribution.layer = 'input': unknown key 'layer'. Did you mean 'layers'?" in wrong.err


def test_values_out_of_range_are_named(mlp_run: Path) -> None:
    answer = call("analyze", "margin", mlp_run, "--set", "examples=0")
    assert "margin.examples = 0: should be greater than or equal to 1." in answer.err
