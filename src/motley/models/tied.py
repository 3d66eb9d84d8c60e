"""Tied tensors: those that a model has under several names, such as a decoder that shares its
weights with an embedding.
"""

from __future__ import annotations

from torch import nn


def second_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of tensors in a model's state, each with the tensor's first name."""
    first_names: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            names[name] = first
    return names


def names_for_a_call(model: nn.Module) -> dict[str, str]:
    """Return the names for `functional_call` with tie_weights=False, each with its tensor's first
    name in the model's state.

    There is one name per module and attribute. With two names of a module, or with
    tie_weights=True, torch does not give the module its own tensors back.
    """
    state, first_names = model.state_dict(), second_names(model)
    names = {}
    for path, module in model.named_modules():  # a module with two names comes once
        prefix = f"{path}." if path else ""
        for attribute in (*module._parameters, *module._buffers):
            name = prefix + attribute
            if name in state:
                names[name] = first_names.get(name, name)
    return names
