"""What does not fit into memory: checked before it is built where the size is known, and otherwise told without a
traceback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from motley.core.errors import MotleyError

if TYPE_CHECKING:
    # The command line needs this module for its error messages, and should not import torch for them.
    import torch

_TORCH_SAYS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",  # the number of bytes does not fit into 64 bits
    "integer multiplication overflow",
)


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has in all; None if the operating system does not say."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None


def check_fits(what: str, needed: int, device: torch.device) -> None:
    """Refuse something that is larger than all the memory of the device it is for."""
    available = memory_of(device)
    if available is not None and needed > available:
        raise MotleyError(
            f"{what} takes {needed / 1e9:,.1f} GB; {_name(device)} has {available / 1e9:,.1f} GB of memory."
        )


def _name(device: torch.device) -> str:
    return "this machine" if device.type == "cpu" else str(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception is of Python, NumPy or torch having too little memory. Torch's is a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_SAYS)


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn a failed allocation inside the block into a message that says for what the memory was wanted."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines() or ["no reason given"]
        raise MotleyError(f"{what}: there is not enough memory for this ({reason[0][:200]}).") from error
