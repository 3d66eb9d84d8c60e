"""Kernels of our own for the GPU, in Triton, for steps that are too small for torch's.

Triton comes with torch's CUDA builds only. Each kernel has a plain counterpart, which is used everywhere else.
"""

from importlib.util import find_spec

from torch import Tensor

AVAILABLE = find_spec("triton") is not None

#: Kernels that take the place of a model's layers. A compiled model has no use for them.
LAYERS = frozenset({"conv", "norm", "pool", "stem"})
#: All kernels, by the names that `engine.kernels` may list.
ALL = LAYERS | {"optimizer"}

LENGTHS = ("rows", "span", "blocks")
"""Arguments that depend on how long a batch is: kernels are not compiled anew for their values."""


def compiled_in(length: int, count: int) -> int:
    """Return a number that comes from a batch's length if it is to be compiled into a kernel, or else 0.

    How often a loop turns is worth a few percent if the compiler knows it, and compiling a network's kernels once more
    takes seconds. The last batch of every client has a length of its own; the others mostly have a power of two.
    """
    return count if length >= 16 and length.bit_count() == 1 else 0


def twin(y: Tensor) -> Tensor:
    """Return an output of an autograd function once more, for a second gradient.

    It has the memory of `y`, and for autograd it is a tensor of its own, not a view.
    """
    return y.data
