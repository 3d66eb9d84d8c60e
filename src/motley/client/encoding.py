"""Uploads in 16 bits with error feedback: rounding errors of one upload are added to the next one.

A client keeps the residual, which is the difference between its true delta and the delta that the
server decodes, and adds it to its next delta before rounding. So the sum of all deltas that the
server has decoded is the sum of the client's true deltas, up to the rounding of the last one:
errors do not accumulate over rounds (Seide et al., 2014; Karimireddy et al., 2019).

The residual is part of the client's state, so an upload that the server did not accept has no
effect on later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from motley.core.part import State

Encoding = Literal["fp32", "fp16", "bf16"]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Prefix of residuals in a client's state.
RESIDUAL = "residual/"


def encoded(
    delta: Mapping[str, Tensor], client_state: Mapping[str, Tensor], encoding: Encoding
) -> tuple[State, State]:
    """Return the rounded delta, and the residuals for the client's state. Integers stay exact."""
    wire, residuals = dict(delta), {}
    for name, tensor in delta.items():
        if encoding != "fp32" and tensor.dtype == torch.float32:
            residual = client_state.get(RESIDUAL + name)
            exact = tensor if residual is None else tensor + residual.to(tensor.device)
            wire[name] = exact.to(TYPES[encoding])
            residuals[RESIDUAL + name] = exact - wire[name].float()
    return wire, residuals


def decoded(
    wire: Mapping[str, Tensor], expected: Mapping[str, Tensor], encoding: Encoding
) -> State:
    """Decode a delta to the types of the state that was sent out (`expected`).

    Tensors of other types than the run's 16-bit type stay as they are; validation rejects them.
    """
    delta = dict(wire)
    if encoding == "fp32":
        return delta
    for name, tensor in wire.items():
        rounded = name in expected and expected[name].dtype == torch.float32
        if rounded and tensor.dtype == TYPES[encoding]:
            delta[name] = tensor.float()
    return delta


def without_residual(client_state: Mapping[str, Tensor]) -> State:
    """Return the method's own part of a client state."""
    return {n: tensor for n, tensor in client_state.items() if not n.startswith(RESIDUAL)}
