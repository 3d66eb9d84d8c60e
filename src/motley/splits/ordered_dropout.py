"""Ordered dropout (FjORD): a network that can run with the leading channels of several widths.

Narrower widths are computed in tensors of full width: all other channels are set to zero after
every layer that has a bias. This gives the same values as a narrower network, in shapes that do not
depend on the width, so a captured step can draw a new width on the device for every batch. Batch
norms keep statistics per width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.lstm import LSTMLayer


class OrderedBatchNorm(nn.BatchNorm2d):
    """Batch norm with shared affine parameters and one row of running statistics per width."""

    masks: Tensor
    choice: Tensor | None = None
    running_mean: Tensor | None
    running_var: Tensor | None
    #: The class of the ordinary norm.
    kind: type[nn.BatchNorm1d | nn.BatchNorm2d] = nn.BatchNorm2d

    @classmethod
    def of(cls, norm: nn.BatchNorm1d | nn.BatchNorm2d, widths: int) -> OrderedBatchNorm:
        """Make one from an ordinary norm, with its parameters and `widths` rows of statistics."""
        if norm.momentum is None and norm.track_running_stats:
            raise MotleyError(
                "split.name = 'ordered': a batch norm with momentum = None averages all batches "
                "alike, and each width has seen other batches. Give it a momentum, such as 0.1."
            )
        ordered = cls(
            norm.num_features, norm.eps, norm.momentum, track_running_stats=norm.track_running_stats
        )
        ordered.kind = nn.BatchNorm1d if isinstance(norm, nn.BatchNorm1d) else nn.BatchNorm2d
        ordered.weight, ordered.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var"):
            row = getattr(norm, name)
            ordered._buffers[name] = None if row is None else row.repeat(widths, 1)
        return ordered

    def forward(self, x: Tensor) -> Tensor:
        x = self._normalized(x)
        if self.choice is not None:
            mask = self.masks.index_select(0, self.choice)
            x = x * mask.view(1, -1, *(1,) * (x.dim() - 2)).to(x.dtype)
        return x

    def _normalized(self, x: Tensor) -> Tensor:
        """Normalize with the batch's statistics and update the chosen row of running statistics.

        In evaluation, normalize with the chosen row.
        """
        if self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self._row(self.running_mean), self._row(self.running_var)
        x = F.batch_norm(
            x, mean, var, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps
        )
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
        """Return a copy of the chosen row.

        Autograd saves it for backward, and a second forward pass before that would change it.
        """
        if self.choice is None:
            return statistics[-1].clone()
        return statistics.index_select(0, self.choice)[0]


def make_ordered(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Make a network ordered, in place.

    `masks` maps each layer to one row of ones and zeros per width, the widest last.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            raise MotleyError(
                f"split.name = 'ordered': {type(module).__name__} sees all channels at once, so a "
                "wider network does not contain a narrower one. Use networks with batch norms, or "
                "without norms."
            )
        if isinstance(module, nn.RNNBase | LSTMLayer):
            raise MotleyError(
                f"split.name = 'ordered': {type(module).__name__} passes its units from position "
                "to position, where they are not masked. Use split.name = 'width'."
            )
        if name not in masks or getattr(module, "bias", None) is None:
            continue
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            parent, _, attribute = name.rpartition(".")
            module = OrderedBatchNorm.of(module, len(masks[name]))
            setattr(model.get_submodule(parent), attribute, module)
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
    """Return the number of widths at which a network can run. An ordinary network has one."""
    return max((len(module.masks) for module in _ordered(model)), default=1)


@contextmanager
def at_width(model: nn.Module, choice: Tensor) -> Iterator[None]:
    """Run a network at the width number `choice`, a tensor of one integer on its device."""
    for module in _ordered(model):
        module.choice = choice
    yield
    for module in _ordered(model):
        module.choice = None


def _ordered(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if "masks" in module._buffers)


def mask_rows(kept: list[int], width: int) -> Tensor:
    """Return one row of `width` ones and zeros for each number of leading channels."""
    return (torch.arange(width) < torch.tensor(kept).unsqueeze(1)).float()
