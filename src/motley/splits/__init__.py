"""Splits: the part of the global state that a client of a given size holds."""

from motley.splits.base import SPLITS, Split, SplitSettings
from motley.splits.depth import Depth, Grouped, Homogeneous
from motley.splits.grid import Grid, GridSettings
from motley.splits.inclusive import Inclusive
from motley.splits.ordered import Ordered, OrderedSettings
from motley.splits.width import Width, WidthSettings

__all__ = [
    "SPLITS",
    "Depth",
    "Grid",
    "GridSettings",
    "Grouped",
    "Homogeneous",
    "Inclusive",
    "Ordered",
    "OrderedSettings",
    "Split",
    "SplitSettings",
    "Width",
    "WidthSettings",
]
