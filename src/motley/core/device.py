"""Memory layouts on a device, and its random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device; on a GPU with channels last, which is faster for convolutions."""
    model = model.to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, laid out as a model's: grouped operations need equal layouts."""
    if device.type == "cuda" and tensor.dim() == 4:
        return tensor.to(device, memory_format=torch.channels_last)
    return tensor.to(device)


def use_generator(generator: torch.Generator | None) -> None:
    """Let torch's random functions on a GPU draw from a generator of that GPU."""
    if generator is not None:
        torch.cuda.default_generators[generator.device.index].graphsafe_set_state(
            generator.graphsafe_get_state()
        )
