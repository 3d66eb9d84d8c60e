"""Uploads in 16 bits, with error feedback: what rounding took away from one upload is added to the next one.

A client keeps the difference between its true change and what the server reads, and adds it to its next change before
that is rounded. So the sum of all that the server has read from a client is the sum of its true changes, up to the last
upload's rounding: errors do not add up over rounds (Seide et al., 2014; Karimireddy et al., 2019).

The difference is part of the client's memory, so an upload that the server did not take leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from motley.core.part import State

Encoding = Literal["fp32", "fp16", "bf16"]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
RESIDUAL = "residual/"
"""How names of what rounding took away begin in a client's memory."""


def encoded(change: Mapping[str, Tensor], memory: Mapping[str, Tensor], encoding: Encoding) -> tuple[State, State]:
    """Return a change as it travels, and what a client has to remember for its next one. Integers stay as they are."""
    wire, residual = dict(change), {}
    for name, tensor in change.items():
        if encoding != "fp32" and tensor.dtype == torch.float32:
            kept = memory.get(RESIDUAL + name)
            whole = tensor if kept is None else tensor + kept.to(tensor.device)
            wire[name] = whole.to(TYPES[encoding])
            residual[RESIDUAL + name] = whole - wire[name].float()
    return wire, residual


def decoded(wire: Mapping[str, Tensor], expected: Mapping[str, Tensor], encoding: Encoding) -> State:
    """Return a change in the types that were sent out, where it came in those that the run asks for."""
    if encoding == "fp32":
        return dict(wire)
    return {
        name: tensor.float()
        if tensor.dtype == TYPES[encoding] and name in expected and expected[name].dtype == torch.float32
        else tensor
        for name, tensor in wire.items()
    }


def without_residual(memory: Mapping[str, Tensor]) -> State:
    """Return what the method itself remembers."""
    return {name: tensor for name, tensor in memory.items() if not name.startswith(RESIDUAL)}
