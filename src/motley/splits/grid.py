"""Splits by depth and width: a level ends at an exit and has a fraction of the channels.

In ScaleFL, depth and width each save about the same fraction of the cost; DepthFL is the same at
full width. A part is the leading channels of the blocks up to the level's exit, and of all exits up
to there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import field_validator, model_validator
from torch import nn

from motley.core.errors import MotleyError
from motley.models.channels import Channels
from motley.models.facts import blocks_of
from motley.models.resnet import ResNet
from motley.models.vit import ViT
from motley.splits.base import SPLITS
from motley.splits.chain_exits import add_chain_exits, check_exits
from motley.splits.exits import add_exits, exit_channels
from motley.splits.width import Rate, Width, WidthSettings


class GridSettings(WidthSettings):
    """The depth and width of each level."""

    name: str = "grid"
    cuts: tuple[int, ...] = (2, 4, 6, 8)
    """Number of blocks up to each level's exit, increasing; the last number is all blocks of the
    architecture.
    """
    rates: tuple[Rate, ...] = (0.7, 0.7, 0.75, 1.0)
    """The width of each level, as a fraction of the channels. The defaults are ScaleFL's; DepthFL
    uses 1 throughout.
    """
    channels: Literal["leading"] = "leading"
    """Always the leading channels."""
    head: Literal["convolution", "linear"] = "convolution"
    """Head of an early exit. convolution: three convolutions before the linear layer (ScaleFL).
    linear: the linear layer only, which ViTs always have.
    """
    output: Literal["last", "mean"] = "last"
    """Output of a size in evaluation: that of its deepest exit (last, ScaleFL), or the mean over
    its exits (mean, DepthFL).
    """

    @field_validator("rates")
    @classmethod
    def _named_once(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        """Allow two levels of the same width: this overrides the validator of `width`."""
        return rates

    @model_validator(mode="after")
    def _one_rate_per_cut(self) -> GridSettings:
        if len(self.rates) != len(self.cuts):
            needed = f"{len(self.cuts)} are needed, one per cut"
            raise ValueError(f"rates = {list(self.rates)}: {needed}")
        return self

    @field_validator("cuts")
    @classmethod
    def _are_increasing(cls, cuts: tuple[int, ...]) -> tuple[int, ...]:
        if not cuts or min(cuts) < 1 or any(a >= b for a, b in pairwise(cuts)):
            raise ValueError("numbers of blocks must increase and start at 1 or more")
        return cuts

    def sizes(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """Return one name per level."""
        return tuple(f"{architectures[0]}-e{level}" for level in range(1, len(self.cuts) + 1))


@SPLITS.register(
    "grid",
    "a size ends at an early exit and has a fraction of the channels: depth and width together",
    paper="ScaleFL, CVPR 2023; DepthFL, ICLR 2023",
    aliases=("exits",),
)
class Grid(Width):
    """One architecture in several depths and widths, with an exit at each depth."""

    Settings = GridSettings
    settings: GridSettings

    def full_width_model(self, level: int) -> nn.Module:
        """Return the model of a level at full width."""
        model, settings = self.base(), self.settings
        has_own_class = isinstance(model, ResNet | ViT)
        blocks = blocks_of(model) if has_own_class else check_exits(model)
        if settings.cuts[-1] != len(blocks):
            raise MotleyError(
                f"split.cuts = {list(settings.cuts)}: the last level is the whole network, and "
                f"{self.architecture!r} has {len(blocks)} blocks."
            )
        add = add_exits if has_own_class else add_chain_exits
        return add(model, settings.cuts, level, settings.head, settings.output == "mean")

    def more_channels(self, whole: nn.Module) -> Channels:
        """Return the channels of the exits."""
        # Those of other models are inferred with the rest of them.
        return exit_channels(whole) if isinstance(whole, ResNet | ViT) else {}
