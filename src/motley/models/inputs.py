"""The shapes of models' inputs: one type per kind of input."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class ImageShape(NamedTuple):
    """Shape of a model's input images: channels, height, width."""

    channels: int
    height: int
    width: int


class SignalShape(NamedTuple):
    """Shape of a signal: channels, and samples over time."""

    channels: int
    length: int


class TokenShape(NamedTuple):
    """A sequence of tokens: its length, and the number of different tokens."""

    length: int
    vocabulary: int


class TableShape(NamedTuple):
    """A row of a table: numeric columns, then one column per category (its number of values)."""

    numbers: int
    categories: tuple[int, ...] = ()


class ArrayShape(NamedTuple):
    """Any other array of numbers."""

    dims: tuple[int, ...]


InputShape: TypeAlias = ImageShape | SignalShape | TokenShape | TableShape | ArrayShape
