"""Noise that changes meet on their way to the server: the robustness study of the InCo paper (Figure 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from motley.core.part import State


def perturbed(change: Mapping[str, Tensor], names: Iterable[str], factor: float, seed: int) -> State:
    """Return a change whose named tensors carry normal noise of `factor` times their own standard deviations."""
    noisy = dict(change)
    numbers: torch.Generator | None = None
    for name in names:
        tensor = change[name]
        if numbers is None:
            numbers = torch.Generator(tensor.device).manual_seed(seed)
        noise = torch.empty_like(tensor).normal_(generator=numbers)
        noisy[name] = tensor + factor * tensor.std(correction=0) * noise
    return noisy
