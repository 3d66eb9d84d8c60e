"""Memory limits: check sizes before allocating, and turn failed allocations into messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from motley.core.errors import MotleyError

if TYPE_CHECKING:
    # The command line uses this module for its error messages and must not import torch for that.
    import torch

#: Texts of the RuntimeErrors that torch raises if memory is not sufficient.
_TORCH_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",  # the number of bytes does not fit into 64 bits
    "integer multiplication overflow",
)


def memory_of(device: torch.device) -> int | None:
    """Return a device's total memory in bytes, or None if the operating system does not tell."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on every system
        return None


def check_fits(what: str, needed: int, device: torch.device) -> None:
    """Raise if `needed` bytes exceed the device's total memory. `what` starts the message."""
    available = memory_of(device)
    if available is not None and needed > available:
        place = "this machine" if device.type == "cpu" else str(device)
        raise MotleyError(
            f"{what} takes {needed / 1e9:,.1f} GB; {place} has {available / 1e9:,.1f} GB of memory."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, NumPy or torch raised an exception because memory was insufficient.

    Torch on a CPU raises a plain RuntimeError, which only its text identifies.
    """
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in _TORCH_MESSAGES)


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn a failed allocation in the block into a message that names the purpose of the memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else "no reason given"
        raise MotleyError(f"{what}: there is not enough memory for this ({reason}).") from error
