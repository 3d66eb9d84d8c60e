"""Ordered dropout (FjORD): a network that can answer with the leading channels of any of several widths.

The narrower answers are computed in full width, with all other channels set to zero behind every layer that has a bias:
the same numbers as those of a narrower network, in shapes that do not depend on the width. So the width can be drawn on
the device, a batch at a time, within a step that was captured once. Batch norms keep statistics a width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.core.errors import MotleyError


class OrderedBatchNorm(nn.BatchNorm2d):
    """Batch norm with one pair of affine parameters, and one row of running statistics per width."""

    masks: Tensor
    choice: Tensor | None = None
    running_mean: Tensor | None
    running_var: Tensor | None

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, widths: int) -> OrderedBatchNorm:
        """Return a norm with the parameters of an ordinary one."""
        made = cls(norm.num_features, norm.eps, norm.momentum, track_running_stats=norm.track_running_stats)
        made.weight, made.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var"):
            row = getattr(norm, name)
            made._buffers[name] = None if row is None else row.repeat(widths, 1)
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self._normalised(x)
        if self.choice is not None:
            x = x * self.masks.index_select(0, self.choice).view(1, -1, 1, 1).to(x.dtype)
        return x

    def _normalised(self, x: Tensor) -> Tensor:
        """Normalise with the batch's statistics, and let the chosen row follow them; in evaluation, with the row's."""
        if self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self._row(self.running_mean), self._row(self.running_var)
        x = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)
        if self.training:
            for statistics, row in ((self.running_mean, mean), (self.running_var, var)):
                if self.choice is None:
                    statistics[-1].copy_(row)
                else:
                    statistics.index_copy_(0, self.choice, row.unsqueeze(0))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return x

    def _row(self, statistics: Tensor) -> Tensor:
        """Return a copy of the chosen row: autograd keeps it, and a second pass before backward would change it."""
        return statistics[-1].clone() if self.choice is None else statistics.index_select(0, self.choice)[0]


def order(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Make a network ordered, in place. `masks`: layer -> a row of ones and zeros for every width, the widest last."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            raise MotleyError(
                f"split.name = 'ordered': {type(module).__name__} sees all channels at once, so a narrower network is "
                "not inside it. Use networks with batch norms, or without norms."
            )
        if name not in masks or getattr(module, "bias", None) is None:
            continue
        if isinstance(module, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            module = OrderedBatchNorm.of(module, len(masks[name]))
            setattr(model.get_submodule(parent), own, module)
        else:
            module.register_forward_hook(_masked)
        module.register_buffer("masks", masks[name], persistent=False)
        module.choice = None


def _masked(module: Any, inputs: Any, output: Tensor) -> Tensor:
    if module.choice is None:
        return output
    mask = module.masks.index_select(0, module.choice)
    return output * mask.view(1, -1, *(1,) * (output.dim() - 2)).to(output.dtype)


def widths_of(model: nn.Module) -> int:
    """Return how many widths a network can answer with; an ordinary one has its own."""
    return max((len(module.masks) for module in _ordered(model)), default=1)


@contextmanager
def narrowed(model: nn.Module, choice: Tensor) -> Iterator[None]:
    """Let a network answer with the width whose number is in `choice`, a tensor of one integer on its device."""
    for module in _ordered(model):
        module.choice = choice
    yield
    for module in _ordered(model):
        module.choice = None


def _ordered(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if "masks" in module._buffers)


def mask_rows(kept: list[int], width: int) -> Tensor:
    """Return a row for each number of leading channels."""
    return (torch.arange(width) < torch.tensor(kept).unsqueeze(1)).float()
