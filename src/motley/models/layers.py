"""Layers that compute as torch's do, with torch's parameters and names, and on a GPU in fewer or better kernels.

A small network's step there is bound by the number of its kernels and by how well they share the GPU with those of
other clients, not by arithmetic. `use_fused` lets a model's layers use `motley.kernels`; everywhere else they are
torch's own functions one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.kernels import ALL, AVAILABLE

if AVAILABLE:
    from motley.kernels import convolve, pool, stem
    from motley.kernels import norm as kernel


class BatchNorm(nn.BatchNorm2d):
    """relu(batch_norm(x) + add), with torch's parameters, buffers and names."""

    fused = False
    """Whether to use the fused kernels where they apply; see `use_fused`."""

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.fused and kernel.applies(x, self.training):
            if not self.training:
                return kernel.scale_add_relu(x, add, self, relu)
            return _with_second(*kernel.norm_add_relu(x, add, self, relu))
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


def _with_second(x: Tensor, second: Tensor) -> Tensor:
    if second is not x:
        x.second = second  # type: ignore[attr-defined]
    return x


@contextmanager
def apart(model: nn.Module, first: int, *, both: bool) -> Iterator[None]:
    """Let batch norms take a batch for two: its first examples, and the others.

    The others move the running statistics before the first do, or, without `both`, not at all.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.forward = partial(_norm_apart, norm, norm.forward, first, both)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _norm_apart(
    norm: _BatchNorm,
    forward: Callable[..., Tensor],
    first: int,
    both: bool,
    x: Tensor,
    add: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    if isinstance(norm, BatchNorm) and norm.fused and kernel.applies_apart(x, first):
        return _with_second(*kernel.norm_add_relu(x, add, norm, relu, first, both))

    def part(rows: slice) -> Tensor:
        plain = add is None and not relu
        return forward(x[rows]) if plain else forward(x[rows], None if add is None else add[rows], relu)

    before = [] if both else [buffer.clone() for buffer in norm.buffers()]
    others = part(slice(first, None))
    for buffer, value in zip(norm.buffers(), before, strict=False):
        buffer.data.copy_(value)  # behind autograd's back: what it keeps of a buffer is not what it needs
    return torch.cat([part(slice(first)), others])


class Convolution(nn.Conv2d):
    """A convolution within a network."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        return convolve.convolve(x, self) if self.fused and convolve.applies(x, self) else super().forward(x)


class MaxPool(nn.MaxPool2d):
    """The largest value of every window."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.fused and pool.applies(x, self)):
            return super().forward(x)
        return _with_second(*pool.max_pool(x))


class Stem(nn.Conv2d):
    """The first convolution of a network, whose input needs no gradient."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        return stem.convolve(x, self) if self.fused and stem.applies(x, self) else super().forward(x)


def use_fused(model: nn.Module, kernels: Collection[str] = ALL) -> None:
    """Let a model's layers use Motley's kernels of the given names, if this machine has Triton."""
    chosen = kernels if AVAILABLE else ()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.fused = "norm" in chosen and module.running_mean is not None
        elif isinstance(module, Convolution):
            module.fused = "conv" in chosen
        elif isinstance(module, MaxPool):
            module.fused = "pool" in chosen
        elif isinstance(module, Stem):
            module.fused = "stem" in chosen


def use_batch_statistics(model: nn.Module) -> None:
    """Let a model's batch norms keep no statistics: they normalise with those of the batch, in evaluation too."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
