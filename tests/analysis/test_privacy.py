"""Attacks find an image in its features, and less in protected ones."""

from __future__ import annotations

import pytest
import torch

from motley.analysis.features import extractor
from motley.analysis.privacy import attack, protected, psnr, ssim
from motley.data import load_dataset
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings


@pytest.fixture(scope="module")
def digit() -> torch.Tensor:
    """Return a digit twice, 16 pixels a side."""
    image = torch.from_numpy(load_dataset("digits").test.images[:2]).permute(0, 3, 1, 2).float() / 255
    return torch.nn.functional.interpolate(image, size=(16, 16), mode="bilinear")


def test_an_image_is_like_itself(digit: torch.Tensor) -> None:
    assert ssim(digit[0], digit[0]) == pytest.approx(1.0)
    noisy = digit[0] + 0.3 * torch.randn(digit[0].shape, generator=torch.Generator().manual_seed(1))
    assert ssim(digit[0], noisy) < 0.9
    black_and_white = torch.tensor([[[0.0, 1.0]]])
    assert psnr(black_and_white, black_and_white + 0.1) == pytest.approx(20.0)
    assert psnr(digit[0], noisy) < psnr(digit[0], digit[0] + 0.1)


def test_noise_is_in_deviations_of_the_features() -> None:
    features = 5 * torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    assert float((protected(features, 0.8, seed=2) - features).std()) == pytest.approx(4.0, rel=0.03)


def test_unprotected_shallow_features_give_a_digit_away(digit: torch.Tensor) -> None:
    """The papers' stem, untrained: all of the image is in its features."""
    torch.manual_seed(1)
    model = MODELS["resnet10"].build(ResNetSettings(), ImageShape(1, 16, 16), 10).eval().requires_grad_(False)
    found = attack(extractor(model), digit, steps=150)
    quality = {name: sum(map(ssim, digit, images)) / len(digit) for name, images in found.items()}
    plain, noisy, mean = quality.values()
    assert plain > 0.9
    assert plain > noisy + 0.2
    assert plain > mean + 0.2
