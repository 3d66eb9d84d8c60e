"""Attacks reconstruct an image from its features, and less from noised or averaged ones."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from motley.analysis.features import extractor
from motley.analysis.perceptual import lpips_distance
from motley.analysis.reconstruction import add_noise, attack, psnr, ssim
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings
from tests.cli.conftest import call


@pytest.fixture(scope="module")
def digit() -> torch.Tensor:
    """Return two digits of 16 x 16 pixels."""
    image = (
        torch.from_numpy(load_dataset("digits").test.images[:2]).permute(0, 3, 1, 2).float() / 255
    )
    return torch.nn.functional.interpolate(image, size=(16, 16), mode="bilinear")


def test_image_quality(digit: torch.Tensor) -> None:
    assert ssim(digit[0], digit[0]) == pytest.approx(1.0)
    noisy = digit[0] + 0.3 * torch.randn(digit[0].shape, generator=torch.Generator().manual_seed(1))
    assert ssim(digit[0], noisy) < 0.9
    black_and_white = torch.tensor([[[0.0, 1.0]]])
    assert psnr(black_and_white, black_and_white + 0.1) == pytest.approx(20.0)
    assert psnr(digit[0], noisy) < psnr(digit[0], digit[0] + 0.1)


def test_noise_is_in_standard_deviations_of_the_features() -> None:
    features = 5 * torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    assert float((add_noise(features, 0.8, seed=2) - features).std()) == pytest.approx(
        4.0, rel=0.03
    )


def test_plain_shallow_features_reveal_a_digit(digit: torch.Tensor) -> None:
    """The features are those of the papers' stem, untrained, which keep the whole image."""
    torch.manual_seed(1)
    model = (
        MODELS["resnet10"]
        .make(ResNetSettings(), ImageShape(1, 16, 16), 10)
        .eval()
        .requires_grad_(False)
    )
    reconstructions = attack(extractor(model), digit, steps=150)
    plain, noisy, mean = [
        sum(map(ssim, digit, images)) / len(digit) for images in reconstructions.values()
    ]
    assert plain > 0.9
    assert plain > noisy + 0.2
    assert plain > mean + 0.2


def test_without_lpips_its_column_is_empty_and_a_note_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    answer = call("analyze", "privacy", run, "-o", tmp_path)
    assert answer.code == 0 and "no LPIPS" in answer.err and "pip install lpips" in answer.err
    rows = list(csv.DictReader((tmp_path / "privacy.csv").open()))
    assert rows and all(row["lpips"] == "" and float(row["ssim"]) <= 1 for row in rows)


def test_missing_weights_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the package is missing, the message says that instead."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(
        MotleyError, match=r"no LPIPS: (AlexNet's weights|No module named|.*torchvision)"
    ):
        lpips_distance()


def test_lpips_is_larger_for_a_worse_image(digit: torch.Tensor) -> None:
    try:
        distance = lpips_distance()
    except MotleyError as error:
        pytest.skip(str(error))
    assert distance(digit[0], digit[0]) == 0
    noise = torch.randn(digit[0].shape, generator=torch.Generator().manual_seed(1))
    assert (
        0 < distance(digit[0], digit[0] + 0.05 * noise) < distance(digit[0], digit[0] + 0.5 * noise)
    )
