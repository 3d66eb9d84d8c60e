"""Kernels of our own for the GPU, in Triton, for steps that are too small for torch's.

Triton comes with torch's CUDA builds only. Each kernel has a plain counterpart, which is used everywhere else.
"""

from importlib.util import find_spec

AVAILABLE = find_spec("triton") is not None

LENGTHS = ("rows", "cut", "span", "blocks", "count")
"""Arguments that depend on how long a batch is. The last batch of every client has a length of its own, so they are
told when a kernel runs and nothing of them is compiled in: compiling a network's kernels once more takes seconds.
"""
