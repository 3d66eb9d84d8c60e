"""The kinds of input that a model can have, as descriptions of one example for `build`.

A family takes one kind, or several. The shape's class names the kind, so that a model for token
sequences can reject images with a clear message (`expect`).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from motley.core.errors import MotleyError


class ImageShape(NamedTuple):
    """Images (N, channels, height, width), float."""

    channels: int
    height: int
    width: int


class SignalShape(NamedTuple):
    """Signals over time (N, channels, length), float."""

    channels: int
    length: int


class TokenShape(NamedTuple):
    """Sequences of token numbers (N, length), int64, each in 0 to vocabulary - 1."""

    length: int
    vocabulary: int


class TableShape(NamedTuple):
    """Rows of a table (N, numbers + len(categories)), float32.

    Numeric columns come first. A categorical column holds a category's number, from 0 to
    its entry in `categories` minus 1.
    """

    numbers: int
    categories: tuple[int, ...] = ()


class ArrayShape(NamedTuple):
    """Arrays of any other shape (N, *dims), float. Only users' models take them."""

    dims: tuple[int, ...]


InputShape: TypeAlias = ImageShape | SignalShape | TokenShape | TableShape | ArrayShape

KINDS: dict[type[Any], str] = {
    ImageShape: "images",
    SignalShape: "signals",
    TokenShape: "token sequences",
    TableShape: "rows of a table",
    ArrayShape: "arrays",
}
S = TypeVar("S", ImageShape, SignalShape, TokenShape, TableShape)


def describe_shape(shape: InputShape) -> str:
    """Return the kind of input and its size in words."""
    if isinstance(shape, ImageShape):
        colours = {1: "grey", 3: "colour"}.get(shape.channels, f"{shape.channels} channels")
        return f"images, {shape.height} x {shape.width}, {colours}"
    if isinstance(shape, SignalShape):
        return f"signals, {shape.channels} channels of length {shape.length}"
    if isinstance(shape, TableShape):
        categories = len(shape.categories)
        text = f"rows of a table, {shape.numbers} number{'s' * (shape.numbers != 1)}"
        if categories:
            text += f" and {categories} {'category' if categories == 1 else 'categories'}"
        return text
    if isinstance(shape, ArrayShape):
        return f"arrays of shape {shape.dims}"
    return f"token sequences of length {shape.length}, vocabulary {shape.vocabulary}"


def dims_of(shape: InputShape) -> tuple[int, ...]:
    """Return the dimensions of one input as the model gets it, without the batch dimension."""
    if isinstance(shape, TokenShape):
        return (shape.length,)
    if isinstance(shape, TableShape):
        return (shape.numbers + len(shape.categories),)
    if isinstance(shape, ArrayShape):
        return shape.dims
    return tuple(shape)


def input_dtype(shape: InputShape, computing: torch.dtype) -> torch.dtype:
    """Return the type of a batch for a model that computes in the given type.

    Token numbers are integers. Tables stay in single precision, because 16 bits cannot hold the
    numbers of many categories; the model converts the numeric columns.
    """
    if isinstance(shape, TokenShape):
        return torch.int64
    if isinstance(shape, TableShape):
        return torch.float32
    return computing


def shape_to_json(shape: InputShape) -> str:
    """Return a shape as text, for messages to nodes."""
    return json.dumps({"kind": KINDS[type(shape)], "values": list(shape)})


def shape_from_json(text: str) -> InputShape:
    """Return the shape that `shape_to_json` wrote. The text comes from the network."""
    values = json.loads(text)
    for cls, kind in KINDS.items():
        if values["kind"] == kind:
            numbers = [
                tuple(map(int, value)) if isinstance(value, list) else int(value)
                for value in values["values"]
            ]
            shape: InputShape = cls(*numbers)
            return shape
    raise MotleyError(
        f"input kind {values['kind']!r}: should be one of {', '.join(KINDS.values())}."
    )


def example_inputs(
    shape: InputShape, count: int, device: torch.device | str | None = None
) -> Tensor:
    """Return `count` inputs of zeros: token 0, category 0, black images.

    Without a device they are on torch's current default device.
    """
    dtype = input_dtype(shape, torch.float32)
    return torch.zeros((count, *dims_of(shape)), dtype=dtype, device=device)


def expect(shape: InputShape, kind: type[S], model: str) -> S:
    """Return the shape if it is of the kind that a model takes, and raise an error if not."""
    if not isinstance(shape, kind):
        raise MotleyError(
            f"model.sizes: {model!r} takes {KINDS[kind]}, and the data set has "
            f"{KINDS[type(shape)]}."
        )
    return shape
