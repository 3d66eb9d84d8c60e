"""States as Flower's arrays: each one array of safetensors bytes, so that nothing is ever unpickled.

Flower addresses every array, and every 5 MB of it, by its hash, and pays two requests for each: a state in one piece
travels in a few of them, where a tensor each would take hundreds. Clients of a size are sent the same bytes, which go
to the SuperLink once.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load, save

from motley.core.errors import MotleyError
from motley.core.part import State

ENCODING = "safetensors"


def pack(**states: State) -> ArrayRecord:
    """Return states by name; empty ones are left out."""
    return ArrayRecord({name: _array(state) for name, state in states.items() if state})


def _array(state: State) -> Array:
    content = save(_separate(state))
    return Array("uint8", (len(content),), ENCODING, content)


def _separate(state: State) -> State:
    """Return dense tensors in host memory that share no storage, as safetensors wants them.

    A tensor is copied only if it must be: a node has little memory.
    """
    separate: State = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage()
        if storage.nbytes() != dense.nbytes or storage.data_ptr() in storages:
            dense = dense.clone()
        storages.add(dense.untyped_storage().data_ptr())
        separate[name] = dense
    return separate


def unpack(arrays: object, name: str) -> State:
    """Return one of the states; one that is not there is empty."""
    record = checked(arrays)
    if name not in record:
        return {}
    try:
        return load(record[name].data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise MotleyError(f"{name} is not in the format {ENCODING}: {error}") from None


def size_in_bytes(arrays: object) -> int:
    """Return how many bytes arrays hold."""
    return sum(len(array.data) for array in checked(arrays).values())


def checked(arrays: object) -> ArrayRecord:
    """Return what should be arrays, if that is what they are."""
    if not isinstance(arrays, ArrayRecord):
        raise MotleyError("it holds no arrays.")
    return arrays
