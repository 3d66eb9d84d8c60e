"""Batch normalisation with what usually follows it: an addition and a ReLU, in one step.

On a GPU a small network's step is bound by the number of its kernels, not by arithmetic. There this module can compute
normalisation, addition, ReLU and the running statistics in one or two kernels forward and as many backward
(`motley.kernels`); everywhere else it is torch's own functions one after the other.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from motley.kernels import AVAILABLE

if AVAILABLE:
    from motley.kernels import norm as kernel
    from motley.kernels import stem


class BatchNorm(nn.BatchNorm2d):
    """relu(batch_norm(x) + add), with torch's parameters, buffers and names."""

    fused = False
    """Whether to use the fused kernels where they apply; see `use_fused`."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.fused and kernel.applies(x, self.training):
            if not self.training:
                return kernel.scale_add_relu(x, add, self, relu)
            y, second = kernel.norm_add_relu(x, add, self, relu)
            y.second = second  # type: ignore[attr-defined]
            return y
        x = super().forward(x)
        if add is not None:
            x = x + add
        return F.relu(x) if relu else x


class GroupNorm(nn.GroupNorm):
    """relu(group_norm(x) + add)."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        x = super().forward(x)
        if add is not None:
            x = x + add
        return F.relu(x) if relu else x


def second_use(x: Tensor) -> Tensor:
    """Return a tensor for its second use: the same values, and where the kernels can add both gradients, a twin."""
    second: Tensor = getattr(x, "second", x)
    return second


class Stem(nn.Conv2d):
    """The first convolution of a network, whose input needs no gradient."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        return stem.convolve(x, self) if self.fused and stem.applies(x, self) else super().forward(x)


def use_fused(model: nn.Module) -> None:
    """Let a model's batch norms and its first convolution use the fused kernels, where there are any."""
    for module in model.modules():
        if isinstance(module, BatchNorm | Stem):
            module.fused = AVAILABLE
