"""Models compiled by torch (`engine.compile`): any model, whatever its layers.

A model is compiled in place, so that its class, its attributes and the names of its tensors stay as
they are. Only calls of the whole model are compiled: a method that runs some of its stages runs
them uncompiled. Models of one size share their compiled code, so the slots of a size compile it
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models.lstm import LSTMLayer

#: Compiled variants of the same Python function. torch's own limit is eight, counted over all
#: models of the process, and beyond it models would silently run uncompiled.
VARIANTS = 1024


def compile_model(model: nn.Module) -> None:
    """Compile a model in place, when it is first called inside `compilation()`, for the shapes it
    is called with.
    """
    if any(isinstance(module, LSTMLayer) for module in model.modules()):
        raise MotleyError(
            "engine.compile = true: torch's compiler unrolls LSTM layers position by position, "
            "which takes minutes and is slower than cuDNN. Set engine.compile = false."
        )
    try:
        model.compile(dynamic=False)
    except RuntimeError as error:  # torch.compile lags behind new versions of Python
        raise MotleyError(f"engine.compile = true: {error}. Set engine.compile = false.") from error


@contextmanager
def compilation() -> Iterator[None]:
    """Let compiled models compile inside the block. If the compiler fails, the error names the
    setting.
    """
    # Imported here, because the import takes a second and 70 MB, which most runs need not spend.
    import torch._dynamo
    from torch._dynamo.exc import TorchDynamoException

    try:
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            yield
    except TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise MotleyError(
            "engine.compile = true: torch cannot compile this model here: "
            f"{type(error).__name__}: {reason} Set engine.compile = false. "
            "(torch.compile needs a C++ compiler on a CPU, and Triton on a GPU.)"
        ) from error


@contextmanager
def no_compilation() -> Iterator[None]:
    """Run compiled models uncompiled inside the block."""
    with torch.compiler.set_stance("force_eager"):
        yield
