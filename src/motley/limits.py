"""Memory limits: check sizes before allocating, and turn failed allocations into messages.

Files may come from anyone. A few kilobytes can declare, or expand to, more bytes than the machine
has, so every reader compares declared sizes with `data_limit` before it allocates. The limit is
half of the memory that is free, or the value of the environment variable MOTLEY_MEMORY_LIMIT.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


#: Environment variable with the most memory that the content of one file may take, as in "8GB".
LIMIT_VARIABLE = "MOTLEY_MEMORY_LIMIT"
#: Without that variable, this part of the free memory: readers often hold two copies of the data.
FREE_FRACTION = 0.5
#: Files that need less than this are always read, however little memory seems to be free.
SMALLEST_LIMIT = 256_000_000
#: A file that expands to more than this, and by more than this factor, is taken for an attack.
#: Photographs and texts shrink by at most 20; deflate reaches 1,000 with nothing but zeros.
BOMB_BYTES = 256_000_000
BOMB_RATIO = 100
#: Address space beside the data itself: libraries that are loaded meanwhile, threads' stacks.
_ADDRESS_SPACE_MARGIN = 256_000_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_bounding = threading.RLock()


class DataLimit(NamedTuple):
    """The most memory that the content of one file may take."""

    bytes: int
    #: Whether the user chose it, with MOTLEY_MEMORY_LIMIT.
    chosen: bool

    def __str__(self) -> str:
        if self.chosen:
            return f"{size_text(self.bytes)} ({LIMIT_VARIABLE})"
        return f"{size_text(self.bytes)}, half of the memory that is free"


def size_text(count: int) -> str:
    """Return a number of bytes with a unit."""
    if count < 1_000_000:
        return f"{count:,} bytes"
    return f"{count / 1e6:,.0f} MB" if count < 1_000_000_000 else f"{count / 1e9:,.1f} GB"


def data_limit() -> DataLimit:
    """Return the most memory that the content of one file may take."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if text:
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)b?", text, re.IGNORECASE)
        if match is None:
            raise MotleyError(
                f"{LIMIT_VARIABLE} = {text!r}: should be a number of bytes, such as 8GB or 500MB."
            )
        return DataLimit(int(float(match[1]) * _UNITS[match[2].lower()]), chosen=True)
    free = free_memory()
    if free is None:
        # Unknown on this system: half of an ordinary machine.
        free = 2**34
    return DataLimit(max(SMALLEST_LIMIT, int(FREE_FRACTION * free)), chosen=False)


def free_memory() -> int | None:
    """Return the bytes that this process can still allocate; None if the system does not tell.

    This is the minimum of the machine's free memory and of what remains below the limits of a
    container and of `ulimit -v`.
    """
    amounts = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(1024 * int(line.split()[1]))
    for left in (_left_in_container(), _left_in_address_space()):
        if left is not None:
            amounts.append(left)
    if not amounts:
        with suppress(AttributeError, ValueError, OSError):
            amounts.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(amounts)) if amounts else None


def _left_in_container() -> int | None:
    """Return the bytes that are left below the limit of a control group, if there is one."""
    folder = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        # "max" is not a number: there is no limit.
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            # The cache of files counts as used, and is given back when memory is needed.
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        return limit - used
    return None


def _left_in_address_space() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _address_space()
    return None if soft == resource.RLIM_INFINITY or taken is None else soft - taken


def _address_space() -> int | None:
    """Return the bytes of address space that this process has, if the system tells."""
    with suppress(OSError, ValueError, AttributeError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def check_data(what: str, needed: int) -> None:
    """Raise if the content of a file would take more memory than the limit. `what` names it."""
    limit = data_limit()
    if needed > limit.bytes:
        raise MotleyError(
            f"{what} would take {size_text(needed)} of memory, and the limit is {limit}. If this "
            f"is intended, set the environment variable {LIMIT_VARIABLE} higher, as in 8GB."
        )


def check_expansion(what: str, stored: int, expanded: int) -> None:
    """Raise if `stored` bytes of a file become suspiciously or impossibly many in memory.

    A user who sets MOTLEY_MEMORY_LIMIT has said how much may be taken, so no ratio is checked then.
    """
    check_data(what, expanded)
    if expanded > max(BOMB_BYTES, BOMB_RATIO * stored) and not data_limit().chosen:
        raise MotleyError(
            f"{what} would expand from {size_text(stored)} to {size_text(expanded)}. More than "
            f"{size_text(BOMB_BYTES)} and {BOMB_RATIO} times as much is taken for an attack. If it "
            f"is not one, save the data without compression, or set the environment variable "
            f"{LIMIT_VARIABLE} to the memory that may be taken, as in 8GB."
        )


@contextmanager
def bounded(what: str, stored: int | None = None) -> Iterator[None]:
    """Let the block take at most `data_limit` of further memory, if the system can enforce it.

    With `stored`, the size of a compressed file, it is at most what `check_expansion` allows. This
    is for formats that do not declare how much memory their content takes: lists in Parquet
    files, JSON. On Linux the address space is limited meanwhile, so that an allocation beyond the
    limit fails, here with a message that begins with `what`. Elsewhere nothing is enforced.
    """
    # With two threads here, the one that ends first would lift the other's limit, and the other
    # would then restore the first one's for good.
    with _bounding:
        limit = data_limit()
        if stored is not None and not limit.chosen:
            plausible = max(BOMB_BYTES, BOMB_RATIO * stored)
            limit = DataLimit(min(limit.bytes, plausible), chosen=False)
        try:
            with _limited_address_space(limit.bytes + _ADDRESS_SPACE_MARGIN):
                yield
        except MemoryError:
            raise MotleyError(
                f"{what} takes more than {size_text(limit.bytes)} of memory, which is the limit. "
                f"If this is intended, set the environment variable {LIMIT_VARIABLE} to the "
                "memory that may be taken, as in 8GB."
            ) from None


@contextmanager
def _limited_address_space(more: int) -> Iterator[None]:
    taken = _address_space()
    if taken is None:
        yield
        return
    import resource  # it exists wherever /proc does

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = taken + more
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            wanted = min(wanted, limit)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
