"""Checks of what users' own methods and stages return, whose messages say what is expected."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.part import State


def require_tensors(value: object, source: str, part: str = "") -> State:
    """Return a result that should be a mapping of tensors.

    `source` says whose result it is, such as "finish of MyClient", and `part` which part of it,
    such as "payload".
    """
    if not isinstance(value, Mapping):
        as_part = f" as its {part}" if part else ""
        raise MotleyError(
            f"{source} returned {describe(value)}{as_part}; a mapping of names to tensors is "
            "expected."
        )
    in_part = f" in its {part}" if part else ""
    for name, tensor in value.items():
        if not isinstance(name, str):
            raise MotleyError(
                f"{source} returned the name {name!r}{in_part}; names should be text."
            )
        if not isinstance(tensor, Tensor):
            raise MotleyError(
                f"{source} returned {describe(tensor)} as {name!r}{in_part}; a tensor is expected."
            )
    return dict(value)


def require_metrics(value: object, source: str) -> dict[str, Tensor | float]:
    """Return a result that should be numbers by name, or tensors with one element."""
    if not isinstance(value, Mapping):
        raise MotleyError(
            f"{source} returned {describe(value)} as metrics; a mapping of names to numbers is "
            "expected."
        )
    for name, number in value.items():
        if isinstance(number, Tensor) and number.numel() != 1:
            problem = f"a tensor of shape {tuple(number.shape)}"
        elif not isinstance(number, Tensor | int | float):
            problem = describe(number)
        else:
            continue
        raise MotleyError(
            f"{source} returned {problem} as the metric {name!r}; a number, or a tensor with one "
            "element, is expected."
        )
    return dict(value)


def require_fit(
    value: object, state: State, source: str, part: str, *, complete: bool = False
) -> State:
    """Return a result whose tensors should be like those of the global state, by name.

    `complete`: it should have all of them.
    """
    tensors = require_tensors(value, source, part)
    if complete and not tensors.keys() >= state.keys():
        lost = next(name for name in state if name not in tensors)
        raise MotleyError(f"{source} returned no {lost!r} in its {part}.")
    for name, tensor in tensors.items():
        if name not in state:
            raise MotleyError(
                f"{source} returned {name!r} in its {part}, which is not in the global state."
            )
        expected = state[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise MotleyError(
                f"{source} returned {name!r} in its {part} with shape {tuple(tensor.shape)} and "
                f"type {tensor.dtype}; {tuple(expected.shape)} and {expected.dtype} are expected."
            )
    return tensors
