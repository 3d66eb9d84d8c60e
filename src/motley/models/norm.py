"""Batch normalisation with what usually follows it: an addition and a ReLU, in one step.

On a GPU a small network's step is bound by the number of its kernels, not by arithmetic. There this module can compute
normalisation, addition, ReLU and the running statistics in one kernel forward and one backward (`motley.models.fused`);
everywhere else it is torch's own functions one after the other.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

try:
    from motley.models import fused
except ImportError:  # Triton comes with torch's CUDA builds only
    fused = None  # type: ignore[assignment]


class BatchNorm(nn.BatchNorm2d):
    """relu(batch_norm(x) + add), with torch's parameters, buffers and names."""

    fused = False
    """Whether to use the one-kernel form where it applies; see `use_fused`."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.fused and fused is not None and fused.applies(x, self.training):
            compute = fused.norm_add_relu if self.training else fused.scale_add_relu
            return compute(x, add, self, relu)
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


def use_fused(model: nn.Module) -> None:
    """Let every batch norm of a model use the one-kernel form."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.fused = True
