"""Kernels of our own for the GPU, in Triton, for steps that are too small for torch's.

Triton comes with torch's CUDA builds only. Each kernel has a plain counterpart, which is used everywhere else.
"""

from importlib.util import find_spec

AVAILABLE = find_spec("triton") is not None


def rounded_up(count: int, bits: int) -> int:
    """Return a number of this many binary digits, and zeros behind them, that is no smaller.

    How often a loop turns is compiled into a kernel, which makes it fast. But the last batch of every client has a
    length of its own: with all counts allowed, kernels would be compiled for every client.
    """
    unit = 1 << max(count.bit_length() - bits, 0)
    return -(-count // unit) * unit
