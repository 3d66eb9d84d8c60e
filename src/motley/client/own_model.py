"""The tensors of a client's own model in its stored state, beside the state of its method.

If a method exchanges no weights, this is the client's whole model (`MODEL`): the client receives
weights once, with its first job. If some tensors are private (`split.private`), it is these
(`PRIVATE`): the client receives all others with every job. A method that trains a personal model
beside the client's part has that one (`PERSONAL`). All of them are in the same store and under the
same round as the rest of the client state, so that they are saved, resumed and rolled back
together with it.

Each has a prefix, so that no other method takes them for its own state: a server that sends a node
another method or another `split.private` in a later round must not get them in a payload or a
delta.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motley.core.part import State

#: Prefixes of the model's tensors in a stored client state.
MODEL, PRIVATE, PERSONAL = "model/", "private/", "personal/"


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
    """Return a stored state without the tensors of the client's own model."""
    own = (MODEL, PRIVATE, PERSONAL)
    return {name: tensor for name, tensor in stored.items() if not name.startswith(own)}
