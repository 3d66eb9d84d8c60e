"""Triton kernels for training steps that are too small for torch's own kernels to be efficient.

Only torch's CUDA builds include Triton. Each kernel has a plain counterpart in torch, which is used
everywhere else.
"""

from importlib.util import find_spec

from torch import Tensor

AVAILABLE = find_spec("triton") is not None

#: Kernels that replace layers of a model. They are not used in compiled models.
LAYERS = frozenset({"conv", "norm", "pool", "stem"})
#: All kernels, by the names that `engine.kernels` may list.
ALL = LAYERS | {"augment", "optimizer"}

#: Arguments that depend on the batch size: kernels are not recompiled for their values.
LENGTHS = ("rows", "span", "blocks")


def compiled_in(length: int, count: int) -> int:
    """Return `count` if it is to be compiled into a kernel as a constant, and 0 otherwise.

    `count` is a loop length that follows from the batch size `length`. A kernel that knows it at
    compile time is a few percent faster, but compiling a network's kernels once more takes seconds.
    Therefore only powers of two are compiled in: full batches mostly have such sizes, while the
    last batch of every client can have any size.
    """
    return count if length >= 16 and length.bit_count() == 1 else 0


def twin(y: Tensor) -> Tensor:
    """Return a second output of an autograd function that shares the memory of `y`.

    For autograd it is a separate tensor, not a view, so it gets a gradient of its own.
    """
    return y.data
