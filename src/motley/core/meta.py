"""Models without memory: names and shapes of their tensors, on torch's meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

#: Functions that draw initial values into a tensor and return it.
DRAWS_VALUES: tuple[Any, ...] = (
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    nn.init.normal_,
    nn.init.uniform_,
)


class _WithoutInitialization(TorchFunctionMode):
    """Leaves out random initialization.

    Tensors on the meta device have no values, so drawing some has no effect. But it costs time and
    memory: torch imports its compiler for it, which takes more than a second and 70 MB.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWS_VALUES:
            return func(*args, **kwargs)
        return args[0] if args else kwargs["tensor"]


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device inside the block, and draw no initial values."""
    with torch.device("meta"), _WithoutInitialization():
        yield
