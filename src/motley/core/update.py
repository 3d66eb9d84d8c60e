"""The result of one client's local training, from the client to the merge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from motley.core.part import Part, State


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """One client's update.

    The client fills in the first fields, and the server adds the others before the merge.

    `delta` is the change of the client's part, under the client's own names. `payload` holds the
    method's additional tensors. `loss` is the mean training loss over the local steps; a GPU may
    still be computing it, like the delta. It is NaN if the client does not report it.

    `received` is the part that the client started from, so its trained model is `received + delta`.
    `part` says where the delta belongs in the global state, and `weight` how much the client
    counts. `row_weights` has, for some tensors, one more factor per row: 0 for rows that do not
    count.
    """

    client: int
    delta: State
    payload: State = field(default_factory=dict)
    num_examples: int = 0
    num_steps: int = 0
    loss: Tensor = field(default_factory=lambda: torch.tensor(math.nan))
    round_number: int = 0
    size: str = ""
    received: State = field(default_factory=dict)
    part: Part = field(default_factory=dict)
    weight: float = 1.0
    row_weights: Mapping[str, Tensor] = field(default_factory=dict)
