"""Splits in both directions: a level ends at an exit of one network, and has a share of the channels of what it has.

ScaleFL chooses depths and widths that cost about the same fraction each; DepthFL is the same at full width. The parts
are leading channels of the blocks up to the level's exit, and of every exit up to there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import field_validator, model_validator
from torch import nn

from motley.core.errors import MotleyError
from motley.models.channels import Channels
from motley.splits.base import SPLITS
from motley.splits.exits import add_exits, count_blocks, exit_channels
from motley.splits.width import Rate, Width, WidthSettings


class GridSettings(WidthSettings):
    """The levels: where each ends, and how wide it is."""

    name: str = "grid"
    cuts: tuple[int, ...] = (2, 4, 6, 8)
    """Number of blocks up to each level's exit, increasing; the last number is all blocks of the architecture."""
    rates: tuple[Rate, ...] = (0.7, 0.7, 0.75, 1.0)
    """The width of each level, as a fraction of the channels. The defaults are ScaleFL's; DepthFL uses 1 throughout."""
    channels: Literal["leading"] = "leading"
    """Always the leading channels."""
    head: Literal["convolution", "linear"] = "convolution"
    """Head of an early exit. convolution: three convolutions before the linear layer (ScaleFL). linear: the linear
    layer only, which ViTs always have.
    """
    output: Literal["last", "mean"] = "last"
    """Output of a size in evaluation: that of its deepest exit (last, ScaleFL), or the mean over its exits (mean,
    DepthFL).
    """

    @field_validator("rates")
    @classmethod
    def _named_once(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        """Two levels may be of one width."""
        return rates

    @model_validator(mode="after")
    def _one_rate_a_cut(self) -> GridSettings:
        if len(self.rates) != len(self.cuts):
            raise ValueError(f"rates = {list(self.rates)}: {len(self.cuts)} are needed, one for each of cuts")
        return self

    @field_validator("cuts")
    @classmethod
    def _rise(cls, cuts: tuple[int, ...]) -> tuple[int, ...]:
        if not cuts or min(cuts) < 1 or any(a >= b for a, b in pairwise(cuts)):
            raise ValueError("numbers of blocks must rise, from at least 1")
        return cuts

    def sizes(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """Return a name for every level."""
        return tuple(f"{architectures[0]}-e{level}" for level in range(1, len(self.cuts) + 1))


@SPLITS.register(
    "grid",
    "a size ends at an early exit and has a share of the channels: depth and width together",
    paper="ScaleFL, CVPR 2023; DepthFL, ICLR 2023",
    aliases=("exits",),
)
class Grid(Width):
    """One architecture in several depths and widths, with an exit at each depth."""

    Settings = GridSettings
    settings: GridSettings

    def uncut(self, level: int) -> nn.Module:
        """Return the model of a level in full width."""
        model, settings = self.base(), self.settings
        if settings.cuts[-1] != count_blocks(model):
            raise MotleyError(
                f"split.cuts = {list(settings.cuts)}: the last level is the whole network, and {self.architecture!r} "
                f"has {count_blocks(model)} blocks."
            )
        return add_exits(model, settings.cuts, level, settings.head, settings.output == "mean")

    def more_channels(self, whole: nn.Module) -> Channels:
        """Return the channels of the exits."""
        return exit_channels(whole)
