"""LPIPS, a perceptual distance of images, if its package and weights are installed.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018.
The package `lpips` includes its linear weights but downloads those of AlexNet. Analyses download
nothing: LPIPS is available only if AlexNet's weights are already in torch's cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.errors import MotleyError

#: The file name of torchvision's AlexNet weights.
WEIGHTS = "alexnet-owt-7be5be79.pth"
#: Images whose shorter side has fewer pixels are enlarged. Otherwise AlexNet's last feature maps
#: would be a single pixel.
MIN_SIDE = 64
Distance = Callable[[Tensor, Tensor], float]


def lpips_distance() -> Distance:
    """Return the LPIPS distance of two images (channels, height, width).

    Images are scaled by the range of the first one. Raises MotleyError, with advice, if LPIPS
    cannot be computed here.
    """
    try:
        import lpips
    except (ImportError, RuntimeError) as error:
        # RuntimeError: torchvision was built for another version of torch.
        raise MotleyError(f"no LPIPS: {error}. pip install lpips torchvision") from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    if not file.exists():
        raise MotleyError(
            f"no LPIPS: AlexNet's weights ({WEIGHTS}) are not in torch's cache, {file.parent}."
        )
    with warnings.catch_warnings():
        # lpips uses arguments of torchvision that are deprecated.
        warnings.simplefilter("ignore")
        network = lpips.LPIPS(net="alex", verbose=False).eval()

    def distance(image: Tensor, other: Tensor) -> float:
        low, high = float(image.min()), float(image.max())
        both = torch.stack([image, other]).float().cpu()
        both = (2 * (both - low) / max(high - low, 1e-12) - 1).clamp(-1, 1)
        if both.shape[1] == 1:
            both = both.expand(-1, 3, -1, -1)
        side = min(both.shape[2:])
        if side < MIN_SIDE:
            both = F.interpolate(both, scale_factor=MIN_SIDE / side, mode="bilinear")
        with torch.no_grad():
            return float(network(both[:1], both[1:]))

    return distance
