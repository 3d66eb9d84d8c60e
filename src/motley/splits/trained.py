"""The trained model of a size, as an ordinary module."""

from __future__ import annotations

from torch import nn

from motley.core.errors import MotleyError, unknown
from motley.core.part import State, take
from motley.splits.base import Split
from motley.splits.ordered_dropout import OrderedBatchNorm


def trained_model(split: Split, state: State, size: str, round_number: int = 0) -> nn.Module:
    """Return the model of a size that is evaluated after a round, in evaluation mode on the CPU.

    `state` is the evaluated global state (`ServerState.model`): the moving average if one is kept.
    The round matters for a rolling window of channels only: these are the channels of the round.
    """
    if size not in split.sizes:
        raise MotleyError(unknown("size", size, split.sizes))
    model = split.build(size)
    model.load_state_dict(take(state, split.evaluated(size, round_number)))
    return at_full_width(model).eval()


def at_full_width(model: nn.Module) -> nn.Module:
    """Return a model of FjORD's split, which can run at several widths, at its full width only.

    Batch norms keep the statistics of that width. Other models are returned as they are.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, OrderedBatchNorm):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _widest(module))
    return model


def _widest(ordered: OrderedBatchNorm) -> nn.BatchNorm1d | nn.BatchNorm2d:
    norm = ordered.kind(
        ordered.num_features,
        ordered.eps,
        ordered.momentum,
        track_running_stats=ordered.track_running_stats,
    )
    norm.weight, norm.bias = ordered.weight, ordered.bias
    if ordered.running_mean is not None and ordered.running_var is not None:
        norm.running_mean = ordered.running_mean[-1].clone()
        norm.running_var = ordered.running_var[-1].clone()
        norm.num_batches_tracked = ordered.num_batches_tracked
    return norm.train(ordered.training)
