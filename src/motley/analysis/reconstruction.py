"""Reconstruction attacks: what features reveal about images.

FedIN, Section 5.5; FedImpro, Appendix F.7. An attacker who sees features and knows the extractor
searches for an image with the same features, by gradient descent on its pixels. Features with
noise, or the mean over several images, reveal less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.analysis.features import extractor
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.perceptual import lpips_distance
from motley.analysis.replay import global_model, open_run, probe_images
from motley.core.errors import MotleyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: FedIN's noise, in standard deviations of the features.
NOISE = 0.8
#: The number of images that are attacked, and of gradient steps.
IMAGES, STEPS = 6, 400
#: The weight of total variation in the attacker's loss, a prior that separates images from noise.
SMOOTHNESS = 1e-3

COLUMNS = ("run", "known to the attacker", "image", "ssim", "psnr", "lpips")


def psnr(image: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB. The peak is the range of the first image."""
    error = (image - other).square().mean()
    return float(20 * torch.log10((image.max() - image.min()) / error.sqrt().clamp(min=1e-12)))


def ssim(image: Tensor, other: Tensor) -> float:
    """Return the structural similarity of two images (channels, height, width).

    Windows are Gaussian with a standard deviation of 1.5 pixels. Wang et al., "Image Quality
    Assessment: From Error Visibility to Structural Similarity", 2004.
    """
    span = float(image.max() - image.min())
    side = min(11, *image.shape[1:])
    distance = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-distance.square() / (2 * 1.5**2))
    window = torch.outer(weights, weights).div(weights.sum() ** 2)[None, None]
    a = image.double().cpu()[:, None]
    b = other.double().cpu()[:, None]
    mean_a, mean_b = F.conv2d(a, window), F.conv2d(b, window)
    variance_a = F.conv2d(a * a, window) - mean_a**2
    variance_b = F.conv2d(b * b, window) - mean_b**2
    covariance = F.conv2d(a * b, window) - mean_a * mean_b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    denominator = (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
    return float((numerator / denominator).mean())


def reconstruct(
    extract: Callable[[Tensor], Tensor], target: Tensor, like: Tensor, steps: int = STEPS
) -> Tensor:
    """Return images whose features are close to `target`, with the shape and range of `like`."""
    low, high = float(like.min()), float(like.max())
    images = torch.full_like(like, (low + high) / 2).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=(high - low) / 20)
    target_variance = target.var().clamp(min=1e-12)
    for step in range(steps):
        # Cosine decay to zero.
        optimizer.param_groups[0]["lr"] = (
            (high - low) / 20 * (1 + math.cos(math.pi * step / steps)) / 2
        )
        variation = images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
        error = F.mse_loss(extract(images), target) / target_variance
        (images.grad,) = torch.autograd.grad(error + SMOOTHNESS * variation, [images])
        optimizer.step()
        with torch.no_grad():
            images.clamp_(low, high)
    return images.detach()


def add_noise(features: Tensor, noise: float, seed: int) -> Tensor:
    """Return features with Gaussian noise of `noise` times their standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(features.shape, generator=generator).to(features.device)
    return features + noise * features.std() * gaussian


def attack(
    extract: Callable[[Tensor], Tensor], images: Tensor, steps: int = STEPS
) -> dict[str, Tensor]:
    """Reconstruct images from their features, from noised features, and from the mean feature."""
    with torch.no_grad():
        features = extract(images)
    known_to_attacker = {
        "features": features,
        f"features + {NOISE:g} sigma": add_noise(features, NOISE, seed=1),
        "mean of features": features.mean(0, keepdim=True).expand_as(features),
    }
    reconstructions = {}
    for name, target in known_to_attacker.items():
        reconstructions[name] = reconstruct(extract, target, images, steps)
    return reconstructions


@analysis("privacy", "images reconstructed from features: plain, with noise, from their mean")
def privacy(paths: Sequence[Path]) -> Findings:
    """Attack the extractor of the smallest size at the newest checkpoint.

    The images are test images of one class.
    """
    lpips, notes = _lpips()
    rows: list[tuple[Any, ...]] = []
    pictures: dict[tuple[str, str], Tensor] = {}
    for path in paths:
        with open_run(path) as (federation, servers):
            model = global_model(federation, servers[-1], federation.split.sizes[0])
            images, labels = probe_images(federation, 50 * IMAGES)
            images = images[labels == labels[0]][:IMAGES]
            pictures[path.name, "true"] = images
            extract = extractor(model.requires_grad_(False))
            for name, reconstructions in attack(extract, images).items():
                pictures[path.name, name] = reconstructions
                pairs = zip(images, reconstructions, strict=True)
                for number, (image, other) in enumerate(pairs):
                    quality = (ssim(image, other), psnr(image, other), lpips(image, other))
                    rows.append((path.name, name, number, *quality))
    return Findings(COLUMNS, rows, _draw(pictures), notes)


def _lpips() -> tuple[Callable[[Tensor, Tensor], float | None], tuple[str, ...]]:
    """Return the LPIPS distance and no notes, or a function that returns None and the reason."""
    try:
        return lpips_distance(), ()
    except MotleyError as error:
        note = f"{error} The column lpips is empty; ssim and psnr are not affected."
        return lambda image, other: None, (note,)


def _draw(pictures: dict[tuple[str, str], Tensor]) -> Figure:
    figure = new_figure(1.3 * IMAGES, 1.5 * len(pictures))
    axes = figure.subplots(len(pictures), IMAGES, squeeze=False)
    for axes_of_row, ((run, name), images) in zip(axes, pictures.items(), strict=True):
        axes_of_row[0].set_title(f"{run}: {name}", loc="left", fontsize=8)
        low, high = float(images.min()), float(images.max())
        for axis in axes_of_row:
            axis.axis("off")
        for axis, image in zip(axes_of_row, images.cpu(), strict=False):
            picture = (image.permute(1, 2, 0) - low) / max(high - low, 1e-12)
            axis.imshow(picture.squeeze(-1), cmap="gray")
    return figure
