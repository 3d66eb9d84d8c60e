"""An exponential moving average of the global state over rounds.

With few clients a round the global state swings from round to round; its average does not. The average is what is
evaluated and handed out; clients go on training from the state itself, so nothing more travels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from motley.core.part import State


def average(before: Mapping[str, Tensor] | None, state: Mapping[str, Tensor], decay: float, rounds: int) -> State:
    """Return decay * before + (1 - decay) * state for the state after round number `rounds` (the first is 1).

    Early on the decay is capped at (rounds - 1) / rounds, which makes the average the plain mean of the rounds so far:
    the random initial state never enters it. Integer buffers are copied.
    """
    if before is None or rounds <= 1:
        return {name: tensor.clone() for name, tensor in state.items()}
    keep = min(decay, (rounds - 1) / rounds)
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    mixed = torch._foreach_lerp([state[name] for name in floats], [before[name] for name in floats], keep)
    copied = {name: tensor.clone() for name, tensor in state.items() if not tensor.is_floating_point()}
    return {**dict(zip(floats, mixed, strict=True)), **copied}
