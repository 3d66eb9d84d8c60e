"""How unlike clients' gradients are: the inter-client gradient variance (CGV) of FedImpro's Definition 4.2."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradientVariance(NamedTuple):
    """The mean over clients of |gradient_i - mean gradient|^2, of the two levels of a model (Eq. 3)."""

    low: float
    high: float

    @property
    def whole(self) -> float:
        """That of all parameters together."""
        return self.low + self.high


def gradient_variance(
    gradients: Sequence[Mapping[str, Tensor]], high: Collection[str] = (), weights: Sequence[float] = ()
) -> GradientVariance:
    """Return how clients' gradients vary, with the names in `high` apart from the others.

    `weights` are the clients' shares in both means; none: all count the same.
    """
    given = torch.tensor(weights or [1.0] * len(gradients), dtype=torch.float64)
    shares = given / given.sum()
    levels = {True: 0.0, False: 0.0}
    for name in gradients[0]:
        rows = torch.stack([gradient[name].detach().double().flatten().cpu() for gradient in gradients])
        levels[name in high] += float(shares @ (rows - shares @ rows).square().sum(1))
    return GradientVariance(low=levels[False], high=levels[True])
