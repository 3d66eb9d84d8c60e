"""Arrays of any shape and type as inputs and targets of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from motley.core.errors import MotleyError
from motley.models.inputs import (
    ArrayShape,
    ImageShape,
    InputShape,
    SignalShape,
    TableShape,
    TokenShape,
)

#: The numbers of channels by which (N, C, H, W) is told from (N, H, W, C).
CHANNELS = (1, 3, 4)
#: A vocabulary or a number of classes above this is taken for a mistake.
MAX_VOCABULARY = 10_000_000
#: Up to this many numbered classes are plausible, however few examples there are.
PLAUSIBLE_CLASSES = 1_000
CHOICES = "image, signal, tokens, table or array"


def shaped_inputs(array: np.ndarray, kind: str, where: str) -> tuple[np.ndarray, InputShape]:
    """Return inputs in the form that `Examples` wants, and their shape.

    `kind` is image, signal, tokens, table, array, or auto: then 3 or 4 dimensions of uint8 and 4 of
    floats are images, 3 of floats signals, 1 or 2 of floats tables, and other floats arrays. Whole
    numbers in other types may be tokens, pixels or measurements, so they need a `kind`.
    """
    if array.dtype.kind not in "biuf":
        raise MotleyError(f"{where}: inputs must be numbers, not of the type {array.dtype}.")
    if array.ndim == 0 or not array.size:
        raise MotleyError(f"{where}: there are no values in it; its shape is {array.shape}.")
    if kind == "auto":
        kind = _guess(array, where)
    if kind == "tokens":
        return _tokens(array, where)
    if kind == "image":
        return _images(array, where)
    values = as_float32(array, where)
    if kind == "signal":
        if values.ndim == 2:
            values = values[:, np.newaxis, :]
        if values.ndim != 3:
            raise MotleyError(f"{where}: signals must be (N, channels, length), not {array.shape}.")
        return values, SignalShape(*values.shape[1:])
    if kind == "table":
        values = values[:, np.newaxis] if values.ndim == 1 else values
        if values.ndim != 2:
            raise MotleyError(f"{where}: a table must be (N, columns), not {array.shape}.")
        return values, TableShape(values.shape[1])
    if kind == "array":
        values = values[:, np.newaxis] if values.ndim == 1 else values
        return values, ArrayShape(values.shape[1:])
    raise MotleyError(f"inputs = {kind!r}: should be auto, {CHOICES}.")


def _guess(array: np.ndarray, where: str) -> str:
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        return "image"
    if array.dtype.kind != "f":
        raise MotleyError(
            f"{where}: inputs of the type {array.dtype} and shape {array.shape} may be tokens, "
            f"pixels or measurements. Say which: inputs = {CHOICES}."
        )
    if array.ndim <= 2:
        return "table"
    return {3: "signal", 4: "image"}.get(array.ndim, "array")


def _tokens(array: np.ndarray, where: str) -> tuple[np.ndarray, InputShape]:
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise MotleyError(
            f"{where}: tokens must be whole numbers of shape (N, length), "
            f"not {array.dtype} of shape {array.shape}."
        )
    if array.min() < 0 or array.max() >= MAX_VOCABULARY:
        raise MotleyError(
            f"{where}: tokens go from {array.min()} to {array.max()}; they must be in "
            f"0..{MAX_VOCABULARY - 1}."
        )
    return array.astype(np.int64), TokenShape(array.shape[1], int(array.max()) + 1)


def _images(array: np.ndarray, where: str) -> tuple[np.ndarray, InputShape]:
    """Return images with channels last: uint8, or float32 as they are."""
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4:
        raise MotleyError(
            f"{where}: images must be (N, H, W), (N, H, W, C) or (N, C, H, W), not {array.shape}."
        )
    if array.shape[1] in CHANNELS and array.shape[3] not in CHANNELS:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype != np.uint8:
        if array.dtype.kind != "f":
            raise MotleyError(f"{where}: images must be uint8 or floats, not {array.dtype}.")
        array = as_float32(array, where)
    height, width, channels = array.shape[1:]
    return np.ascontiguousarray(array), ImageShape(channels, height, width)


def as_float32(array: np.ndarray, where: str) -> np.ndarray:
    """Return finite numbers in single precision; others are refused with the index."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        index = tuple(int(number) for number in np.argwhere(~finite)[0])
        value = array[index]
        reason = "is too large for single precision" if np.isfinite(value) else "is not finite"
        raise MotleyError(f"{where}: example {index[0]}: the value {value} at {index} {reason}.")
    return values


def class_targets(array: np.ndarray, where: Callable[[int], str]) -> np.ndarray:
    """Return whole numbers as int64 class or token numbers. `where(i)` names example i."""
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise MotleyError(f"{where(0)}: labels must be whole numbers or texts, not {array.dtype}.")
    outside = (array < 0) | (array >= MAX_VOCABULARY)
    if outside.any():
        index = tuple(int(number) for number in np.argwhere(outside)[0])
        raise MotleyError(
            f"{where(index[0])}: the label {array[index]} is outside 0..{MAX_VOCABULARY - 1}. "
            "Labels are class numbers from 0 on, or texts."
        )
    return array.astype(np.int64)


def check_class_numbers(classes: int, examples: int, where: str, *, tested: bool = True) -> None:
    """Refuse a number of classes that comes from one stray label.

    Every class has a row in the classifier and in many tables, so a label of 2^31 in a file of a
    kilobyte would take gigabytes. On a node (`tested` is false) a few examples may have any class
    of a large federation, whose own number of classes limits them.
    """
    if tested and classes > max(PLAUSIBLE_CLASSES, examples):
        raise MotleyError(
            f"{where}: the largest label {classes - 1} makes {classes:,} classes, more than the "
            f"{examples:,} examples. Number the classes 0, 1, 2, ... without gaps."
        )


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor, an array, an image of Pillow or numbers as an array.

    bfloat16, which NumPy lacks, becomes float32.
    """
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(value)
