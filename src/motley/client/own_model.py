"""A client's own model in its stored state, for methods that exchange no weights.

Such a client receives weights once, with its first job. From then on its model (parameters and
buffers) is kept with its client state, in the same store and under the same round, so that it is
saved, resumed and rolled back together with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motley.core.part import State

#: Prefix of the model's tensors in a stored client state.
MODEL = "model/"


def with_model(client_state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> State:
    """Return a client state with the client's model in it."""
    return {**client_state, **{MODEL + name: tensor for name, tensor in model.items()}}


def model_in(stored: Mapping[str, Tensor]) -> State:
    """Return the client's model in a stored state."""
    model = {}
    for name, tensor in stored.items():
        if name.startswith(MODEL):
            model[name.removeprefix(MODEL)] = tensor
    return model


def without_model(stored: Mapping[str, Tensor]) -> State:
    """Return a stored state without the client's model."""
    return {name: tensor for name, tensor in stored.items() if not name.startswith(MODEL)}
