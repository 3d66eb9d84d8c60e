"""The trained model of a size, as an ordinary module."""

from __future__ import annotations

from torch import nn

from motley.core.errors import MotleyError, unknown
from motley.core.part import State, take
from motley.splits.base import Split


def trained_model(split: Split, state: State, size: str, round_number: int = 0) -> nn.Module:
    """Return the model of a size that is evaluated after a round, in evaluation mode on the CPU.

    `state` is the evaluated global state (`ServerState.model`): the moving average if one is kept.
    The round matters for a rolling window of channels only: these are the channels of the round.
    """
    if size not in split.sizes:
        raise MotleyError(unknown("size", size, split.sizes))
    model = split.build(size)
    model.load_state_dict(take(state, split.evaluated(size, round_number)))
    return model.eval()
