"""CKA: 1 for a rotated and scaled copy, near 0 for independent features, and by definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motley.analysis.cka import (
    linear_cka,
    mean_off_diagonal,
    minibatch_cka,
    similarity,
    unbiased_hsic,
)


def gaussian(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(x: Tensor, y: Tensor) -> float:
    """Return HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), with an explicit centering matrix."""
    count = len(x)
    centering = torch.eye(count, dtype=torch.float64) - 1 / count

    def hsic(k: Tensor, ell: Tensor) -> Tensor:
        return torch.trace(k @ centering @ ell @ centering) / (count - 1) ** 2

    k, ell = x @ x.T, y @ y.T
    return float(hsic(k, ell) / (hsic(k, k) * hsic(ell, ell)).sqrt())


def test_a_rotated_and_scaled_copy_is_the_same() -> None:
    x = gaussian(60, 12)
    rotation = torch.linalg.qr(gaussian(12, 12, seed=2)).Q
    copy = 7.5 * x @ rotation + 3.0
    assert linear_cka(x, copy) == pytest.approx(1.0, abs=1e-9)
    assert minibatch_cka([(x, copy)]) == pytest.approx(1.0, abs=1e-9)
    assert minibatch_cka(zip(x.split(20), copy.split(20), strict=True)) == pytest.approx(
        1.0, abs=1e-9
    )


def test_independent_features_are_not_similar() -> None:
    x, y = gaussian(2000, 5), gaussian(2000, 5, seed=3)
    assert linear_cka(x, y) < 0.02
    assert abs(minibatch_cka(zip(x.split(100), y.split(100), strict=True))) < 0.02


@pytest.mark.parametrize("seed", range(4))
def test_small_matrices_agree_with_the_definition(seed: int) -> None:
    x, y = gaussian(7, 3, seed=seed), gaussian(7, 4, seed=seed + 10)
    assert linear_cka(x, y) == pytest.approx(by_definition(x, y))


def test_hsic_is_unbiased() -> None:
    """With few examples, the biased estimate is large even for independent features."""
    pairs = [(gaussian(8, 30, seed=seed), gaussian(8, 30, seed=seed + 1000)) for seed in range(300)]
    biased = sum(linear_cka(x, y) for x, y in pairs) / len(pairs)
    unbiased = sum(float(unbiased_hsic(x @ x.T, y @ y.T)) for x, y in pairs) / len(pairs)
    scale = sum(float(unbiased_hsic(x @ x.T, x @ x.T)) for x, _ in pairs) / len(pairs)
    assert biased > 0.5
    assert abs(unbiased / scale) < 0.05


def test_clients_are_compared_at_stages_that_both_have() -> None:
    x = gaussian(40, 6)
    matrices = similarity([{"a": x}, {"a": 2 * x, "b": x}], batch=20)
    assert matrices["a"] == pytest.approx(torch.ones(2, 2), abs=1e-5)
    assert matrices["b"].isnan().sum() == 3
    assert mean_off_diagonal(matrices["a"]) == pytest.approx(1.0, abs=1e-5)
