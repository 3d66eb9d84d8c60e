"""Batch norms that take a batch for two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
    twice: bool = False,
    **options: Any,
) -> Any:
    def part(rows: slice) -> Tensor:
        if add is not None:
            return forward(x[rows], add=add[rows], **options)
        return forward(x[rows], **options)

    before = [] if both else [buffer.clone() for buffer in norm.buffers()]
    others = part(slice(first, None))
    for buffer, value in zip(norm.buffers(), before, strict=False):
        buffer.data.copy_(value)  # behind autograd's back: what it keeps of a buffer is not what it needs
    y = torch.cat([part(slice(first)), others])
    return (y, y) if twice else y
