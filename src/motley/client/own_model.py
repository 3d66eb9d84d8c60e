"""What a client keeps of its model in its stored state, beside the state of its method.

If a method exchanges no weights, this is the client's whole model (`MODEL`): the client receives
weights once, with its first job. If some tensors are private (`split.private`), it is these
(`PRIVATE`): the client receives all others with every job. Both are in the same store and under the
same round as the rest of the client state, so that they are saved, resumed and rolled back
together with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motley.core.part import State

#: Prefixes of the model's tensors in a stored client state.
MODEL, PRIVATE = "model/", "private/"


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> State:
    """Return tensors under the names that they have in a stored state."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def stored_under(prefix: str, stored: Mapping[str, Tensor]) -> State:
    """Return the tensors of a stored state that have a prefix, under their own names."""
    tensors = {}
    for name, tensor in stored.items():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
    return tensors


def state_of_method(stored: Mapping[str, Tensor]) -> State:
    """Return a stored state without what it has of the client's model."""
    return {n: tensor for n, tensor in stored.items() if not n.startswith((MODEL, PRIVATE))}
