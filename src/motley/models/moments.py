"""The moments of BatchNorm's inputs, which clients report to recalibrate running statistics.

`motley.server.recalibration` pools the reports and describes the whole procedure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.core.part import State

#: The tensors that a client reports per layer, all in the shape of the layer's running statistics.
COUNT, SUM, SQUARES = "count", "sum", "squares"
MOMENTS = (COUNT, SUM, SQUARES)


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers with running statistics, by the prefix of their tensors."""
    norms = {}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            norms[f"{name}." if name else ""] = module
    return norms


def normalizes_by_batch(model: nn.Module) -> bool:
    """Tell whether a BatchNorm layer has no running statistics: an output then depends on the other
    examples of its batch, in evaluation too.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return any(norm.running_mean is None for norm in norms)


def batch_moments(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
    """Pass batches of (images, labels) through a model; return the moments of BatchNorm's inputs.

    BatchNorm layers normalize with their batch; everything else, such as dropout, is in evaluation
    mode. The model's running statistics are overwritten; they are loaded again before the model is
    trained next.
    """
    norms = norms_of(model)
    moments: State = {}
    hooks = []
    for prefix, norm in norms.items():
        assert norm.running_mean is not None
        for name in MOMENTS:
            moments[prefix + name] = torch.zeros_like(norm.running_mean, dtype=torch.float64)
        hooks.append(norm.register_forward_pre_hook(_adding_to(moments, prefix)))
    training = model.training
    model.eval()
    for norm in norms.values():
        norm.train()
    try:
        with torch.no_grad():
            for images in _without_lone_examples(batches):
                model(images)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return moments


def _adding_to(moments: State, prefix: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that adds the inputs of a layer to its moments."""
    count, total, squares = (_own_row(moments[prefix + name]) for name in MOMENTS)

    def add(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        x: Tensor = inputs[0]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        # The batch's mean and variance in single precision, by torch's stable algorithm, and
        # everything after that in double precision: sums of squares in single precision lose the
        # variance of a channel with a large mean.
        variance, mean = torch.var_mean(x.float(), dims, correction=0)
        variance, mean = variance.double(), mean.double()
        number = x.numel() // x.shape[1]
        count.add_(number)
        total.add_(mean, alpha=number)
        squares.add_(variance + mean.square(), alpha=number)

    return add


def _own_row(statistics: Tensor) -> Tensor:
    """Return the row of a model's own width.

    FjORD's layers keep one row per width; the model's own is the last.
    """
    return statistics if statistics.dim() == 1 else statistics[-1]


def _without_lone_examples(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """Yield the images of batches. A batch of one example is merged into the batch before it.

    BatchNorm cannot normalize a single example. If a client has only one, it is left out.
    """
    waiting: Tensor | None = None
    for images, _ in batches:
        if waiting is None:
            waiting = images
        elif len(images) == 1:
            waiting = torch.cat([waiting, images])
        else:
            yield waiting
            waiting = images
    if waiting is not None and len(waiting) > 1:
        yield waiting


def layers_in(moments: State) -> list[str]:
    """Return the prefixes of the layers whose moments are reported."""
    prefixes = []
    for name in moments:
        if name == COUNT or name.endswith(f".{COUNT}"):
            prefixes.append(name.removesuffix(COUNT))
    return prefixes
