"""States as Flower's arrays. Each state is one array of safetensors bytes: nothing is unpickled.

Flower sends every array in pieces of 5 MB and makes two requests per piece. A state in one array
needs a few requests, and one array per tensor would need hundreds. Flower knows pieces by their
hash, so the part that all clients of a size receive goes to the SuperLink once.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load, save

from motley.core.errors import MotleyError
from motley.core.part import State

ENCODING = "safetensors"


def pack(**states: State) -> ArrayRecord:
    """Return an array record with one entry per state. Empty states are left out."""
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
    """Return one of the states in an array record; an empty one if it is missing."""
    record = checked(arrays)
    if name not in record:
        return {}
    try:
        return load(record[name].data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise MotleyError(f"{name} is not in the format {ENCODING}: {error}") from None


def size_in_bytes(arrays: object) -> int:
    """Return the number of bytes in an array record."""
    return sum(len(array.data) for array in checked(arrays).values())


def checked(arrays: object) -> ArrayRecord:
    """Return `arrays` if it is an array record; nodes and servers may send anything."""
    if not isinstance(arrays, ArrayRecord):
        raise MotleyError("it holds no arrays.")
    return arrays
