"""LPIPS, a distance of images as a network sees them, where its package and weights are at hand.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018. The package `lpips`
brings its own linear weights; those of the AlexNet below them it would fetch from the network, which an analysis does
not do: they are used if they lie in torch's cache already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.errors import MotleyError

WEIGHTS = "alexnet-owt-7be5be79.pth"
"""What torchvision calls the weights of its AlexNet."""
SMALLEST = 64
"""Pixels a side below which images are enlarged: AlexNet's maps would be of one pixel."""
Distance = Callable[[Tensor, Tensor], float]


def lpips_distance() -> Distance:
    """Return LPIPS of two images (channels, height, width), scaled by the first one's range.

    Raises MotleyError, with what to do, where it cannot be computed here.
    """
    try:
        import lpips
    except (ImportError, RuntimeError) as error:  # the latter for a torchvision that was built for another torch
        raise MotleyError(f"no LPIPS: {error}. pip install lpips torchvision") from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    if not file.exists():
        raise MotleyError(f"no LPIPS: AlexNet's weights, {WEIGHTS}, are not in torch's cache, {file.parent}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips calls torchvision as its older versions were called
        network = lpips.LPIPS(net="alex", verbose=False).eval()

    def distance(image: Tensor, other: Tensor) -> float:
        low, high = float(image.min()), float(image.max())
        both = (2 * (torch.stack([image, other]).float().cpu() - low) / max(high - low, 1e-12) - 1).clamp(-1, 1)
        if both.shape[1] == 1:
            both = both.expand(-1, 3, -1, -1)
        if min(both.shape[2:]) < SMALLEST:
            both = F.interpolate(both, scale_factor=SMALLEST / min(both.shape[2:]), mode="bilinear")
        with torch.no_grad():
            return float(network(both[:1], both[1:]))

    return distance
