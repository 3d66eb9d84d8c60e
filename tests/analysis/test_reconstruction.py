"""Attacks reconstruct an image from its features, and less from noised or averaged ones."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from motley.analysis import ANALYSES
from motley.analysis.features import extractor
from motley.analysis.perceptual import lpips_distance
from motley.analysis.reconstruction import (
    Attack,
    Attacked,
    Known,
    PrivacySettings,
    add_noise,
    psnr,
    run_attack,
    ssim,
    starting_images,
    target_features,
)
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings
from tests.cli.conftest import call


@pytest.fixture(scope="module")
def digit() -> torch.Tensor:
    """Return two digits of 16 x 16 pixels."""
    image = (
        torch.from_numpy(load_dataset("digits").test.inputs[:2]).permute(0, 3, 1, 2).float() / 255
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
    extract, attacked = extractor(model), Attacked(digit, torch.tensor([0, 1]))
    settings = PrivacySettings(steps=150)

    def mean_ssim(attack: Attack) -> float:
        *_, last = run_attack(extract, attacked, attack, settings)
        assert last.step == 150
        return sum(map(ssim, digit, last.images)) / len(digit)

    plain = mean_ssim(Attack("features", 0.0, "gray"))
    assert plain > 0.9
    assert plain > mean_ssim(Attack("features", 0.8, "gray")) + 0.2
    assert plain > mean_ssim(Attack("mean", 0.0, "gray")) + 0.2
    # From noise, the image is found as well: its features determine it.
    assert mean_ssim(Attack("features", 0.0, "noise")) > 0.9


# ---- what the attacker sees


def shallow(images: torch.Tensor) -> torch.Tensor:
    """Return features that are easy to compute by hand: the sum over channels."""
    return images.sum(1)


def test_means_by_hand() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    labels = torch.tensor([3, 5, 3, 5])
    examples = {3: torch.full((3, 1, 2, 2), 7.0), 5: torch.full((1, 1, 2, 2), 9.0)}
    client = torch.cat([torch.zeros(150, 1, 2, 2), torch.full((50, 1, 2, 2), 8.0)])
    attacked = Attacked(images, labels, examples, client)
    expected: dict[Known, list[float]] = {
        "features": [0, 1, 2, 3],
        "mean": [1.5] * 4,
        "class mean": [7, 9, 7, 9],
        "client mean": [2.0] * 4,
    }
    for known, values in expected.items():
        target = target_features(shallow, attacked, known, lambda features: features)
        assert target.shape == (4, 2, 2)
        assert target[:, 0, 0].tolist() == values


def test_a_mean_has_one_noise_for_all_its_images() -> None:
    images, labels = torch.zeros(4, 1, 2, 2), torch.tensor([3, 5, 3, 5])
    examples = {label: torch.zeros(1, 1, 2, 2) for label in (3, 5)}

    def add(features: torch.Tensor) -> torch.Tensor:
        return add_noise(features, 1.0, seed=1, unit="absolute")

    target = target_features(shallow, Attacked(images, labels, examples), "class mean", add)
    assert torch.equal(target[0], target[2]) and torch.equal(target[1], target[3])
    assert not torch.equal(target[0], target[1])
    mean = target_features(shallow, Attacked(images, labels), "mean", add)
    assert all(torch.equal(mean[0], row) for row in mean)


def test_a_noise_start_fills_the_range_and_is_the_same_every_time(digit: torch.Tensor) -> None:
    noise = starting_images(digit, "noise")
    assert float(noise.min()) >= float(digit.min()) and float(noise.max()) <= float(digit.max())
    assert float(noise.std()) == pytest.approx(float(digit.max()) * 12**-0.5, rel=0.1)
    assert torch.equal(noise, starting_images(digit, "noise"))
    middle = float(digit.min() + digit.max()) / 2
    assert starting_images(digit, "gray").unique().tolist() == pytest.approx([middle])


# ---- the command


def test_one_command_gives_a_curve_over_noise_levels_from_several_starts(
    run: Path, tmp_path: Path
) -> None:
    more = ("known=[class mean, client mean]", "noise=[0,0.5]", "start=gray,noise")
    quick = ("steps=20", "every=10", "images=2", "client=1", "smoothness=0", "size=mlp2")
    options = [word for setting in (*more, *quick) for word in ("--set", setting)]
    answer = call("analyze", "privacy", run, *options, "-o", tmp_path)
    assert answer.code == 0, answer.err
    assert "attack, run: class mean, noise 0.5, noise start" in answer.err
    content = json.loads((tmp_path / "privacy.json").read_text())
    assert content["settings"]["noise"] == [0, 0.5]
    rows = content["rows"]
    attacks = {(row["known to the attacker"], row["noise"], row["start"]) for row in rows}
    assert len(attacks) == 2 * 2 * 2
    # Two images and their mean, at two steps.
    assert len(rows) == 8 * 3 * 2
    assert {row["step"] for row in rows} == {10, 20}
    one, other, mean = rows[3:6]
    assert mean["image"] == "all"
    assert mean["ssim"] == pytest.approx((one["ssim"] + other["ssim"]) / 2)


def test_more_noise_reveals_less(run: Path) -> None:
    settings = PrivacySettings(known=("features",), noise=(0.0, 1.0, 5.0), steps=100)
    rows = ANALYSES["privacy"]([run], settings).rows
    curve = {row[2]: row[6] for row in rows if row[5] == "all"}
    assert curve[0.0] > curve[1.0] > curve[5.0]


def test_wrong_settings_are_named(run: Path) -> None:
    wrong = {
        "noise=-1": "privacy.noise.0 = -1: should be greater than or equal to 0.",
        "start=white": "privacy.start.0 = 'white': should be 'gray' or 'noise'.",
        "known=client mean": "privacy.known = 'client mean': needs privacy.client.",
        "client=6": "privacy.client = 6: Allowed: -1 to 5.",
        "size=mlp7": "privacy.size: unknown size 'mlp7'. Did you mean 'mlp",
        "stage=stem": "privacy.stage = 'stem': model 'mlp1': unknown stage 'stem'.",
        "classes=11": "privacy.classes = [11]: there are no such images. Allowed: 0, 1, 2",
    }
    for setting, message in wrong.items():
        answer = call("analyze", "privacy", run, "--set", setting)
        assert answer.code == 2 and message in answer.err, answer.err


def test_without_lpips_its_column_is_empty_and_a_note_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    answer = call("analyze", "privacy", run, "--set", "steps=20", "-o", tmp_path)
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
