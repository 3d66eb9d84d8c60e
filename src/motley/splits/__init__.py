"""Splits: which part of the global state a client of a given size holds."""

from motley.splits.base import SPLITS, Split, SplitSettings
from motley.splits.depth import Depth, Grouped, Homogeneous

__all__ = ["SPLITS", "Depth", "Grouped", "Homogeneous", "Split", "SplitSettings"]
