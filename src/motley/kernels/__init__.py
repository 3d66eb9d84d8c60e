"""Kernels of our own for the GPU, in Triton, for steps that are too small for torch's.

Triton comes with torch's CUDA builds only. Each kernel has a plain counterpart, which is used everywhere else.
"""

from importlib.util import find_spec

AVAILABLE = find_spec("triton") is not None
