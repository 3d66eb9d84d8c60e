"""Divergence of weights, variance of gradients, distance of features: by hand, and in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from motley.analysis.divergence import layer_divergence, weight_divergence
from motley.analysis.gradient_variance import gradient_variance
from motley.analysis.wasserstein import conditional_wasserstein, sliced_wasserstein
from motley.core.errors import MotleyError

# ---- weights


def test_divergence_by_hand() -> None:
    """Means are (1, 0) and 4; the distances are (1, 3) from the first and (1, 3) from the second client."""
    models = [
        {"a.weight": torch.tensor([0.0, 0.0]), "a.bias": torch.tensor([1.0])},
        {"a.weight": torch.tensor([2.0, 0.0]), "a.bias": torch.tensor([7.0])},
    ]
    assert weight_divergence(models) == pytest.approx(math.sqrt(1 + 9))
    assert layer_divergence(models) == {"a": pytest.approx(math.sqrt(10))}


def test_a_layers_mean_is_over_the_models_that_have_it() -> None:
    models = [
        {"a.weight": torch.tensor([1.0]), "b.weight": torch.tensor([5.0])},
        {"a.weight": torch.tensor([3.0])},
        {"a.weight": torch.tensor([5.0]), "b.weight": torch.tensor([9.0])},
    ]
    assert layer_divergence(models) == pytest.approx({"a": 4 / 3, "b": 2.0})
    assert weight_divergence(models) == pytest.approx((math.sqrt(4 + 4) + 0 + math.sqrt(4 + 4)) / 3)


def test_a_layer_that_one_client_has_says_nothing() -> None:
    first = {"a.weight": torch.tensor([0.0, 0.0]), "b.weight": torch.zeros(1)}
    models = [first, {"a.weight": torch.tensor([6.0, 8.0])}]
    assert layer_divergence(models) == {"a": 5.0}


def test_of_a_tensor_that_clients_hold_in_part_every_numbers_mean_is_over_its_holders() -> None:
    """The first number's mean is 3 and the second's 8: distances are 3 from the first client, 3 from the second."""
    models = [{"a.weight": torch.tensor([0.0, torch.nan])}, {"a.weight": torch.tensor([6.0, 8.0])}]
    assert weight_divergence(models) == layer_divergence(models)["a"] == 3.0


def test_equal_models_do_not_diverge() -> None:
    model = {"a.weight": torch.randn(3, 2)}
    assert weight_divergence([model, model, model]) == pytest.approx(0, abs=1e-12)


# ---- gradients


def test_gradient_variance_by_hand() -> None:
    one = {"a.weight": torch.tensor([1.0, 0.0]), "a.bias": torch.tensor([0.0]), "b.weight": torch.tensor([5.0])}
    other = {"a.weight": torch.tensor([3.0, 4.0]), "a.bias": torch.tensor([6.0])}
    assert gradient_variance([one, other]) == pytest.approx({"a": 1 + 4 + 9})  # a layer of one client varies in nothing


def test_gradient_variance_is_torchs() -> None:
    rows = torch.randn(5, 7, dtype=torch.float64)
    found = gradient_variance([{"w": row} for row in rows])
    assert found == pytest.approx({"w": float(rows.var(0, correction=0).sum())})


# ---- features


def test_distance_of_numbers_is_the_area_between_their_quantiles() -> None:
    one, other = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[8.0], [5.0], [6.0]])
    assert sliced_wasserstein(one, other) == pytest.approx(5.0)
    assert sliced_wasserstein(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0], [2.0]])) == pytest.approx(0.5)
    assert sliced_wasserstein(one, one) == 0


def test_distance_of_a_shift_is_its_length_times_the_mean_cosine() -> None:
    """In the plane a direction's mean |cosine| is 2 / pi, and all points move by the same along it."""
    points = torch.randn(50, 2)
    moved = points + torch.tensor([3.0, 4.0])
    assert sliced_wasserstein(points, moved, directions=4000) == pytest.approx(5 * 2 / math.pi, rel=0.03)


def test_the_conditional_distance_weighs_classes_by_both_sides() -> None:
    """Class 0 is apart by 2 and class 1 by 10; shares are 1/4 and 3/4 here, 1/2 and 1/2 there."""
    features, labels = torch.tensor([[0.0], [1.0], [1.0], [1.0]]), torch.tensor([0, 1, 1, 1])
    others, other_labels = torch.tensor([[2.0], [11.0]]), torch.tensor([0, 1])
    expected = 0.5 * (0.25 * 2 + 0.75 * 10) + 0.5 * (0.5 * 2 + 0.5 * 10)
    assert conditional_wasserstein(features, labels, others, other_labels) == pytest.approx(expected)
    assert conditional_wasserstein(others, other_labels, features, labels) == pytest.approx(expected)


def test_clients_with_equal_conditionals_are_near_whatever_their_labels() -> None:
    numbers = torch.Generator().manual_seed(0)
    labels, others = torch.tensor([0] * 900 + [1] * 100), torch.tensor([0] * 100 + [1] * 900)
    one, two = (torch.randn(1000, 1, generator=numbers) + 20 * at[:, None] for at in (labels, others))
    assert conditional_wasserstein(one, labels, two, others) < 0.3
    assert sliced_wasserstein(one, two) > 10


def test_a_class_of_one_side_leaves_the_comparison() -> None:
    one, labels = torch.tensor([[0.0], [50.0]]), torch.tensor([0, 1])
    assert conditional_wasserstein(one, labels, torch.tensor([[1.0]]), torch.tensor([0])) == pytest.approx(1.0)
    with pytest.raises(MotleyError, match="no class in common"):
        conditional_wasserstein(one, labels, torch.tensor([[1.0]]), torch.tensor([2]))
