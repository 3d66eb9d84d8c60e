"""The devices that a run uses, how tensors are laid out on them, and how exactly they compute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from motley.core.errors import MotleyError


def request_hardware_queues() -> None:
    """Ask CUDA for 32 hardware queues. With the default of 8, streams of more slots wait in line.

    CUDA reads the environment variable when it starts, so this must come before the process first
    uses a GPU. A value that is already set is kept.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def choose_devices(setting: str) -> list[torch.device]:
    """Return the devices that `engine.device` names. The first is the server's home device.

    `auto` is every GPU that is visible, or else the CPU. The CPU may be named several times, which
    changes nothing but the code that runs: the code for several devices can be tried without them.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        if not count:
            return [torch.device("cpu")]
        return [torch.device("cuda", index) for index in range(count)]
    names = [name.strip() for name in setting.split(",")]
    if not all(re.fullmatch(r"cpu|cuda|cuda:\d+", name) for name in names):
        raise _refused(
            setting, "allowed are auto, cpu, cuda, cuda:N, or several GPUs: cuda:0,cuda:1"
        )
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise _refused(
            setting,
            "several devices are GPUs only: allowed is cpu, or a list such as cuda:0,cuda:1",
        )
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


@contextmanager
def numerics(precision: str, threads: int) -> Iterator[None]:
    """Compute with a precision and a number of CPU threads inside the block, then restore both.

    With fp32, matrix products and convolutions on a GPU do not use tf32. The flags belong to the
    whole process, so they are set only while a federation trains or evaluates, and two federations
    do not change each other's. Entering and leaving costs microseconds. Steps that are captured
    inside the block keep their precision.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, torch.get_num_threads()
    _set_numerics(precision != "fp32", precision != "fp32", threads)
    try:
        yield
    finally:
        _set_numerics(*before)


def _set_numerics(matmul_tf32: bool, cudnn_tf32: bool, threads: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
