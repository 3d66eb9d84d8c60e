"""Where tensors live, and how exactly they are computed: decided here and nowhere else."""

from __future__ import annotations

import os
import re

import torch

from motley.core.errors import MotleyError

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""Hardware queues for streams: by default there are eight, and slots beyond that would wait for each other."""


def choose_devices(setting: str) -> list[torch.device]:
    """Return the devices that `engine.device` names: first the home device, with the server's state and evaluation.

    `auto` is every GPU that is visible, or else the CPU. The CPU may be named several times, which changes nothing but
    the code that runs: what several devices do can then be tried without them.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    names = [name.strip() for name in setting.split(",")]
    if not all(re.fullmatch(r"cpu|cuda|cuda:\d+", name) for name in names):
        raise _refused(setting, "allowed are auto, cpu, cuda, cuda:N, or several GPUs: cuda:0,cuda:1")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise _refused(setting, "several devices are GPUs only: allowed is cpu, or a list such as cuda:0,cuda:1")
    if names[0] == "cpu":
        return [torch.device("cpu")] * len(names)
    numbers = [int(name.partition(":")[2] or 0) for name in names]
    if max(numbers) >= count:
        has = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise _refused(setting, f"there is no cuda:{max(numbers)} on this machine; it has {has}")
    if len(set(numbers)) < len(numbers):
        raise _refused(setting, "a GPU is named twice: allowed is each one once")
    return [torch.device("cuda", number) for number in numbers]


def _refused(setting: str, reason: str) -> MotleyError:
    return MotleyError(f"engine.device = {setting!r}: {reason}.")


def set_precision(precision: str, device: torch.device) -> None:
    """Allow or forbid tf32 in matrix products and convolutions on a GPU."""
    if precision in ("fp16", "bf16") and device.type == "cpu":
        raise MotleyError(
            f"engine.precision = {precision!r}: is for a GPU; torch's CPU gradients of convolutions may be wrong in it."
        )
    allowed = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
