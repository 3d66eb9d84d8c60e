"""Reconstruction attacks: what an image's features give away (FedIN, Section 5.5; FedImpro, Appendix F.7).

Whoever sees features and knows the extractor looks for an image whose features are the same, by gradient descent on
pixels. Features with noise on them, or the mean over several images, leave less to be found.
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
from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.perceptual import lpips_distance
from motley.analysis.replay import global_model, opened, probe_images
from motley.core.errors import MotleyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOISE = 0.8
"""Standard deviations of noise that FedIN adds."""
IMAGES, STEPS = 6, 400
SMOOTHNESS = 1e-3
"""Weight of the total variation, which tells an image from noise."""


COLUMNS = ("run", "known to the attacker", "image", "ssim", "psnr", "lpips")


def psnr(image: Tensor, other: Tensor) -> float:
    """Return the peak signal-to-noise ratio of two images, scaled by the first one's range."""
    error = (image - other).square().mean()
    return float(20 * torch.log10((image.max() - image.min()) / error.sqrt().clamp(min=1e-12)))


def ssim(image: Tensor, other: Tensor) -> float:
    """Return the structural similarity of two images (channels, height, width) over Gaussian windows of 1.5 pixels.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004.
    """
    span = float(image.max() - image.min())
    side = min(11, *image.shape[1:])
    distance = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-distance.square() / (2 * 1.5**2))
    window = torch.outer(weights, weights).div(weights.sum() ** 2)[None, None]
    a, b = (picture.double().cpu()[:, None] for picture in (image, other))
    mean_a, mean_b, aa, bb, ab = (F.conv2d(picture, window) for picture in (a, b, a * a, b * b, a * b))
    small, contrast = (0.01 * span) ** 2, (0.03 * span) ** 2
    upper = (2 * mean_a * mean_b + small) * (2 * (ab - mean_a * mean_b) + contrast)
    lower = (mean_a**2 + mean_b**2 + small) * (aa - mean_a**2 + bb - mean_b**2 + contrast)
    return float((upper / lower).mean())


def reconstruct(extract: Callable[[Tensor], Tensor], wanted: Tensor, like: Tensor, steps: int = STEPS) -> Tensor:
    """Return images of the shape and range of `like` whose features come near the wanted ones."""
    low, high = float(like.min()), float(like.max())
    images = torch.full_like(like, (low + high) / 2).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=(high - low) / 20)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (high - low) / 20 * (1 + math.cos(math.pi * step / steps)) / 2
        variation = images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
        loss = F.mse_loss(extract(images), wanted) / wanted.var().clamp(min=1e-12) + SMOOTHNESS * variation
        (images.grad,) = torch.autograd.grad(loss, [images])
        optimizer.step()
        with torch.no_grad():
            images.clamp_(low, high)
    return images.detach()


def protected(features: Tensor, noise: float, seed: int) -> Tensor:
    """Return features with noise of so many of their standard deviations."""
    drawn = torch.randn(features.shape, generator=torch.Generator().manual_seed(seed)).to(features.device)
    return features + noise * features.std() * drawn


def attack(extract: Callable[[Tensor], Tensor], images: Tensor, steps: int = STEPS) -> dict[str, Tensor]:
    """Return what is found from features as they are, with FedIN's noise, and from their mean."""
    with torch.no_grad():
        features = extract(images)
    known = {
        "features": features,
        f"features + {NOISE:g} sigma": protected(features, NOISE, seed=1),
        "mean of features": features.mean(0, keepdim=True).expand_as(features),
    }
    return {name: reconstruct(extract, wanted, images, steps) for name, wanted in known.items()}


@ANALYSES.register("privacy", "images reconstructed from features: as they are, with noise, from their mean")
def privacy(paths: Sequence[Path]) -> Findings:
    """Attack the smallest size's extractor at the newest checkpoint with test images of one class."""
    lpips, notes = _lpips()
    rows: list[tuple[Any, ...]] = []
    pictures: dict[tuple[str, str], Tensor] = {}
    for path in paths:
        with opened(path) as (federation, servers):
            model = global_model(federation, servers[-1], federation.split.sizes[0])
            images, labels = probe_images(federation, 50 * IMAGES)
            images = images[labels == labels[0]][:IMAGES]
            pictures[path.name, "true"] = images
            for name, found in attack(extractor(model.requires_grad_(False)), images).items():
                pictures[path.name, name] = found
                rows += [
                    (path.name, name, number, ssim(image, other), psnr(image, other), lpips(image, other))
                    for number, (image, other) in enumerate(zip(images, found, strict=True))
                ]
    return Findings(COLUMNS, rows, _draw(pictures), notes)


def _lpips() -> tuple[Callable[[Tensor, Tensor], float | None], tuple[str, ...]]:
    """Return LPIPS, or nothing instead of it and why."""
    try:
        return lpips_distance(), ()
    except MotleyError as error:
        return lambda image, other: None, (f"{error} The column lpips is empty; ssim and psnr are there.",)


def _draw(pictures: dict[tuple[str, str], Tensor]) -> Figure:
    figure = new_figure(1.3 * IMAGES, 1.5 * len(pictures))
    axes = figure.subplots(len(pictures), IMAGES, squeeze=False)
    for line, ((run, name), images) in zip(axes, pictures.items(), strict=True):
        line[0].set_title(f"{run}: {name}", loc="left", fontsize=8)
        low, high = float(images.min()), float(images.max())
        for axis in line:
            axis.axis("off")
        for axis, image in zip(line, images.cpu(), strict=False):
            picture = (image.permute(1, 2, 0) - low) / max(high - low, 1e-12)
            axis.imshow(picture.squeeze(-1), cmap="gray")
    return figure
