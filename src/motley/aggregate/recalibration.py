"""Recalibrated BatchNorm statistics: the running statistics of the evaluated model, computed from all clients' data.

A round averages the running statistics of a few clients, whose labels are skewed and whose weights are not those of the
merged model. Recalibration (`server.statistics.name = "recalibrate"`) replaces the result. Every client gets its
part of the model that will be evaluated, passes its examples through it once, without augmentation and in single
precision, and reports per BatchNorm layer and channel

    n = number of the layer's inputs,    s = sum of the inputs,    q = sum of their squares.

The server adds these up over clients, N = sum n, S = sum s, Q = sum q, and sets

    running_mean = S / N,    running_var = (Q - S^2 / N) / (N - 1).

These are the mean and the unbiased variance of all inputs together (`torch.var` of their concatenation, and the law of
total variance for any sizes of clients). The mean of the clients' variances would leave out how far apart their means
are. A coordinate is pooled over the clients that hold it: the clients of one size with
split.normalization_statistics = "per-size", those of all sizes that share it with "shared".

In the pass, each BatchNorm normalizes with the statistics of the current batch, as in training and as HeteroFL's static
batch norm does. The inputs of the first BatchNorm do not depend on that, so its statistics are exact. Those of deeper
layers are the statistics of inputs that were normalized batch by batch. Statistics that fit the final model exactly
would take one pass per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.core.errors import MotleyError
from motley.core.part import Part, State, add_at, select

if TYPE_CHECKING:
    from motley.config import Config
    from motley.splits import Split

#: What a client reports per layer. All three have the shape of the layer's running statistics.
COUNT, SUM, SQUARES = "count", "sum", "squares"
MOMENTS = (COUNT, SUM, SQUARES)


# ---- client


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that keep running statistics, by the prefix of their tensors' names."""
    norms = {}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            norms[f"{name}." if name else ""] = module
    return norms


def batch_moments(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
    """Pass batches of (images, labels) through a model, and return the moments of every BatchNorm's inputs.

    BatchNorm layers normalize with their batch; everything else, such as dropout, is in evaluation mode. The model's
    running statistics are not kept: whoever trains the model next loads them again.
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
        # The batch's mean and variance in single precision, by torch's stable algorithm, and everything after that in
        # double precision: sums of squares in single precision lose the variance of a channel with a large mean.
        variance, mean = torch.var_mean(x.float(), dims, correction=0)
        variance, mean = variance.double(), mean.double()
        number = x.numel() // x.shape[1]
        count.add_(number)
        total.add_(mean, alpha=number)
        squares.add_(variance + mean.square(), alpha=number)

    return add


def _own_row(statistics: Tensor) -> Tensor:
    """Return the row of a model's own width. FjORD's layers keep one row per width; the model's own is the last."""
    return statistics if statistics.dim() == 1 else statistics[-1]


def _without_lone_examples(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """Yield the images of batches. A batch of one example joins the batch before it: BatchNorm cannot normalize it.

    The only example of a client has no batch to join, and is left out.
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


# ---- server


def pool(model: State, reports: Sequence[tuple[Part, State]]) -> State:
    """Return a model with the running statistics of all clients' inputs together.

    A report is a client's part of the model with its moments (`batch_moments`). Coordinates that nobody reported keep
    their statistics, and so do those whose pooled statistics are not finite: from such a state no client could train.
    """
    totals: dict[str, State] = {}
    variances: dict[str, str] = {}
    for part, moments in reports:
        for prefix in _layers_in(moments):
            piece = part[f"{prefix}running_mean"]
            if piece.name not in totals:
                like = model[piece.name]
                totals[piece.name] = {name: torch.zeros_like(like, dtype=torch.float64) for name in MOMENTS}
                variances[piece.name] = part[f"{prefix}running_var"].name
            for name in MOMENTS:
                add_at(totals[piece.name][name], piece.index, moments[prefix + name])
    after = dict(model)
    for mean_name, total in totals.items():
        variance_name = variances[mean_name]
        mean, variance = mean_and_variance(total[COUNT], total[SUM], total[SQUARES])
        mean, variance = mean.to(model[mean_name].dtype), variance.to(model[variance_name].dtype)
        usable = (total[COUNT] > 1) & mean.isfinite() & variance.isfinite()
        after[mean_name] = torch.where(usable, mean, model[mean_name])
        after[variance_name] = torch.where(usable, variance, model[variance_name])
    return after


def mean_and_variance(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return S / N and (Q - S^2 / N) / (N - 1), the mean and the unbiased variance of N numbers."""
    mean = total / count
    variance = (squares - total * mean) / (count - 1)
    return mean, variance.clamp(min=0.0)  # rounding can make the variance of equal numbers negative


def _layers_in(moments: State) -> list[str]:
    return [name.removesuffix(COUNT) for name in moments if name == COUNT or name.endswith(f".{COUNT}")]


def check_report(model: State, part: Part, moments: State) -> None:
    """Raise ValueError if a node's report is not one of its part: it is not trusted to send what was asked for."""
    expected = {}
    for local, piece in part.items():
        if local == "running_mean" or local.endswith(".running_mean"):
            shape = select(model[piece.name], piece.index).shape
            for name in MOMENTS:
                expected[local.removesuffix("running_mean") + name] = shape
    for name in moments.keys() ^ expected.keys():
        raise ValueError(f"{name!r} is missing or was not asked for")
    for name, shape in expected.items():
        if moments[name].shape != shape:
            raise ValueError(f"{name!r} has shape {tuple(moments[name].shape)}, not {tuple(shape)}")
        if moments[name].dtype != torch.float64:
            raise ValueError(f"{name!r} is {moments[name].dtype}, not torch.float64")
        if not moments[name].isfinite().all():
            raise ValueError(f"{name!r} holds a number that is not finite")
    for prefix in _layers_in(moments):
        count, total, squares = (moments[prefix + name] for name in MOMENTS)
        # No numbers have n q < s^2; clients compute with rounding.
        if (count < 0).any() or (count * squares < total.square() * (1 - 1e-6)).any():
            raise ValueError(f"{prefix!r} has moments that no inputs have")


def check_settings(config: Config, split: Split) -> None:
    """Refuse recalibration if there are no statistics to recalibrate, or if the method computes its own."""
    if config.server.statistics.name != "recalibrate":
        return
    setting = "server.statistics.name = 'recalibrate'"
    if config.split.normalization_statistics == "batch":
        raise MotleyError(
            f"{setting}: with split.normalization_statistics = 'batch' there are no running statistics to recalibrate. "
            "Use split.normalization_statistics = 'per-size' or 'shared', or server.statistics.name = 'averaged'."
        )
    if not any(norms_of(blueprint.module) for blueprint in split.blueprints.values()):
        raise MotleyError(
            f"{setting}: {', '.join(split.sizes)} have no BatchNorm layers with running statistics, so there is "
            "nothing to recalibrate. Use server.statistics.name = 'averaged'."
        )
    if getattr(config.method, "statistics", "") == "pass":
        raise MotleyError(
            f"{setting}: method.statistics = 'pass' already replaces the statistics before each evaluation, by the "
            "method's own formula. Use method.statistics = 'running', or server.statistics.name = 'averaged'."
        )
