"""The stage that keeps an exponential moving average (EMA) of the global state over rounds.

With few clients per round the global state swings from round to round, and its average does not.
The average is evaluated and handed out. Clients go on training from the global state itself, so
nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState


@dataclass(frozen=True)
class EMA:
    """Update the moving average with the new global state."""

    decay: float
    name: str = "ema"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return a server state with the new average."""
        ema = moving_average(server.ema, server.state, self.decay, server.round_number)
        return StageResult(replace(server, ema=ema), aggregate)


def moving_average(
    before: Mapping[str, Tensor] | None,
    state: Mapping[str, Tensor],
    decay: float,
    round_number: int,
) -> State:
    """Return decay * before + (1 - decay) * state, where `state` is the one after the round.

    Rounds are counted from 1. Early on the decay is capped at (round_number - 1) / round_number,
    which makes the average the plain mean of the rounds so far: the random initial state never
    enters it. Integer buffers are copied.
    """
    if before is None or round_number <= 1:
        return {name: tensor.clone() for name, tensor in state.items()}
    weight = min(decay, (round_number - 1) / round_number)
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    averages = torch._foreach_lerp(
        [state[name] for name in floats], [before[name] for name in floats], weight
    )
    after = dict(zip(floats, averages, strict=True))
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            after[name] = tensor.clone()
    return after
