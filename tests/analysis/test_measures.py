"""Divergence of weights, variance of gradients, distance of features, by hand."""

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
    """The means are (1, 0) and 4. Both clients have distances of 1 and 3 to them."""
    models = [
        {"a.weight": torch.tensor([0.0, 0.0]), "a.bias": torch.tensor([1.0])},
        {"a.weight": torch.tensor([2.0, 0.0]), "a.bias": torch.tensor([7.0])},
    ]
    assert weight_divergence(models, [1] * len(models)) == pytest.approx(math.sqrt(1 + 9))
    assert layer_divergence(models, [1] * len(models)) == {"a": pytest.approx(math.sqrt(10))}


def test_a_layers_mean_is_over_the_models_that_have_it() -> None:
    models = [
        {"a.weight": torch.tensor([1.0]), "b.weight": torch.tensor([5.0])},
        {"a.weight": torch.tensor([3.0])},
        {"a.weight": torch.tensor([5.0]), "b.weight": torch.tensor([9.0])},
    ]
    assert layer_divergence(models, [1] * len(models)) == pytest.approx({"a": 4 / 3, "b": 2.0})
    assert weight_divergence(models, [1] * len(models)) == pytest.approx(
        (math.sqrt(4 + 4) + 0 + math.sqrt(4 + 4)) / 3
    )


def test_parameters_can_be_grouped_otherwise() -> None:
    models = [
        {"a.weight": torch.tensor([0.0]), "b.weight": torch.tensor([0.0])},
        {"a.weight": torch.tensor([6.0]), "b.weight": torch.tensor([8.0])},
    ]
    groups = {"a.weight": "low", "b.weight": "low"}
    assert layer_divergence(models, [1, 1], groups) == pytest.approx({"low": 5.0})


def test_a_layer_of_one_client_is_left_out() -> None:
    first = {"a.weight": torch.tensor([0.0, 0.0]), "b.weight": torch.zeros(1)}
    models = [first, {"a.weight": torch.tensor([6.0, 8.0])}]
    assert layer_divergence(models, [1] * len(models)) == {"a": 5.0}


def test_the_mean_of_a_coordinate_is_over_the_clients_that_hold_it() -> None:
    """The means of the coordinates are 3 and 8. Both clients have a distance of 3 to them."""
    models = [{"a.weight": torch.tensor([0.0, torch.nan])}, {"a.weight": torch.tensor([6.0, 8.0])}]
    assert (
        weight_divergence(models, [1] * len(models)) == layer_divergence(models, [1, 1])["a"] == 3.0
    )


def test_the_mean_model_is_weighted_by_examples_and_the_mean_distance_is_not() -> None:
    """With 1 and 3 examples the mean is 6: the distances are 6 and 2, and their mean is 4."""
    models = [{"a.weight": torch.tensor([0.0])}, {"a.weight": torch.tensor([8.0])}]
    assert weight_divergence(models, [1, 3]) == pytest.approx(4.0)
    # In unequal parts: the second coordinate's mean is over the clients of 3 and 1 examples.
    models = [
        {"a.weight": torch.tensor([0.0, torch.nan])},
        {"a.weight": torch.tensor([8.0, 4.0])},
        {"a.weight": torch.tensor([6.0, 8.0])},
    ]
    distances = [6.0, math.sqrt(2**2 + 1**2), math.sqrt(0**2 + 3**2)]
    assert weight_divergence(models, [1, 3, 1]) == pytest.approx(sum(distances) / 3)


def test_equal_models_do_not_diverge() -> None:
    model = {"a.weight": torch.randn(3, 2)}
    assert weight_divergence([model, model, model], [1, 2, 3]) == pytest.approx(0, abs=1e-12)


# ---- gradients


def test_gradient_variance_by_hand() -> None:
    one = {
        "a.weight": torch.tensor([1.0, 0.0]),
        "a.bias": torch.tensor([0.0]),
        "b.weight": torch.tensor([5.0]),
    }
    other = {"a.weight": torch.tensor([3.0, 4.0]), "a.bias": torch.tensor([6.0])}
    # Layer b is left out, because only one client has it.
    assert gradient_variance([one, other], [1, 1]) == pytest.approx({"a": 1 + 4 + 9})


def test_gradient_variance_is_weighted_by_examples() -> None:
    """FedImpro: p = (1/4, 3/4), so the mean is 6 and the variance 1/4 * 36 + 3/4 * 4 = 12."""
    gradients = [{"a.weight": torch.tensor([0.0])}, {"a.weight": torch.tensor([8.0])}]
    assert gradient_variance(gradients, [10, 30]) == pytest.approx({"a": 12.0})


def test_gradient_variance_equals_torchs() -> None:
    rows = torch.randn(5, 7, dtype=torch.float64)
    variance = gradient_variance([{"w": row} for row in rows], [1.0] * 5)
    assert variance == pytest.approx({"w": float(rows.var(0, correction=0).sum())})


# ---- features


def test_distance_in_one_dimension_is_the_area_between_quantile_functions() -> None:
    one, other = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[8.0], [5.0], [6.0]])
    assert sliced_wasserstein(one, other) == pytest.approx(5.0)
    assert sliced_wasserstein(
        torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0], [2.0]])
    ) == pytest.approx(0.5)
    assert sliced_wasserstein(one, one) == 0


def test_distance_of_a_shift_is_its_length_times_the_mean_cosine() -> None:
    """In two dimensions, the mean |cosine| between a random direction and the shift is 2 / pi."""
    points = torch.randn(50, 2)
    moved = points + torch.tensor([3.0, 4.0])
    assert sliced_wasserstein(points, moved, directions=4000) == pytest.approx(
        5 * 2 / math.pi, rel=0.03
    )


def test_the_conditional_distance_weighs_classes_by_both_sides() -> None:
    """The distances are 2 (class 0) and 10 (class 1).

    The classes' probabilities are 1/4 and 3/4 in one set, 1/2 and 1/2 in the other.
    """
    features, labels = torch.tensor([[0.0], [1.0], [1.0], [1.0]]), torch.tensor([0, 1, 1, 1])
    others, other_labels = torch.tensor([[2.0], [11.0]]), torch.tensor([0, 1])
    expected = 0.5 * (0.25 * 2 + 0.75 * 10) + 0.5 * (0.5 * 2 + 0.5 * 10)
    assert conditional_wasserstein(features, labels, others, other_labels) == pytest.approx(
        expected
    )
    assert conditional_wasserstein(others, other_labels, features, labels) == pytest.approx(
        expected
    )


def test_label_skew_alone_gives_a_small_conditional_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, others = torch.tensor([0] * 900 + [1] * 100), torch.tensor([0] * 100 + [1] * 900)
    one = torch.randn(1000, 1, generator=generator) + 20 * labels[:, None]
    two = torch.randn(1000, 1, generator=generator) + 20 * others[:, None]
    assert conditional_wasserstein(one, labels, two, others) < 0.3
    assert sliced_wasserstein(one, two) > 10


def test_a_class_that_one_side_lacks_is_left_out() -> None:
    one, labels = torch.tensor([[0.0], [50.0]]), torch.tensor([0, 1])
    assert conditional_wasserstein(
        one, labels, torch.tensor([[1.0]]), torch.tensor([0])
    ) == pytest.approx(1.0)
    with pytest.raises(MotleyError, match="no class in common"):
        conditional_wasserstein(one, labels, torch.tensor([[1.0]]), torch.tensor([2]))
