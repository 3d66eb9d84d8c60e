"""Where tensors live, and how exactly they are computed: decided here and nowhere else."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from motley.errors import MotleyError

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""Hardware queues for streams: by default there are eight, and slots beyond that would wait for each other."""


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names; `auto` is the first GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise MotleyError(f"engine.device = {name!r}: allowed are auto, cpu, cuda and cuda:N.")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise MotleyError(f"engine.device = {name!r}: this machine has {count} CUDA device(s).")
    return torch.device("cuda", index)


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device; on a GPU with channels last in memory, where convolutions are faster."""
    model = model.to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, laid out as `place` lays out a model's: grouped operations need equal layouts."""
    if device.type == "cuda" and tensor.dim() == 4:
        return tensor.to(device, memory_format=torch.channels_last)
    return tensor.to(device)


def set_precision(precision: str, device: torch.device) -> None:
    """Allow or forbid tf32 in matrix products and convolutions on a GPU."""
    if precision == "bf16" and device.type == "cpu":
        raise MotleyError(
            "engine.precision = 'bf16': is for a GPU; on a CPU, torch's gradients of some convolutions are wrong."
        )
    allowed = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
