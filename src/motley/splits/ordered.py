"""FjORD's split: leading channels, in networks that can also run at every narrower width.

Batch norms keep one row of running statistics per width. A size holds the rows of its own width and
of all narrower ones, so a row is averaged over the clients that have at least its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import Piece, State, take
from motley.models.channels import CLASSES
from motley.models.inference.check import close, random_state
from motley.models.inference.facts import random_inputs
from motley.splits.base import SPLITS
from motley.splits.ordered_dropout import at_width, make_ordered, mask_rows
from motley.splits.width import Width, WidthSettings, initial_statistics, num_kept

ROWS = ("running_mean", "running_var")


class OrderedSettings(WidthSettings):
    """The widths."""

    name: str = "ordered"
    rates: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.2)
    """One size per rate: the fraction of the leading channels it keeps."""
    channels: Literal["leading"] = "leading"
    """Always the leading channels."""


@SPLITS.register(
    "ordered",
    "leading channels, in networks that can also run at every narrower width",
    paper="FjORD, NeurIPS 2021",
)
class Ordered(Width):
    """`width`, with nested widths inside each size."""

    Settings = OrderedSettings
    settings: OrderedSettings

    def _build_narrow(self, level: int) -> nn.Module:
        model = super()._build_narrow(level)
        rates = self._inside(self.settings.rates[level])
        masks = {}
        for name, axes in self.axes.items():
            axis = axes[0] if axes else None
            if name.endswith(".bias") and axis is not None and axis.stream != CLASSES:
                counts = [num_kept(axis, rate) for rate in rates]
                rows = mask_rows(counts, counts[-1])
                rows = rows.repeat_interleave(axis.inner, 1).repeat(1, axis.repeats)
                masks[name.removesuffix(".bias")] = rows
        make_ordered(model, masks)
        return model

    def check(self) -> None:
        """Check models whose channels were inferred: a wide model must contain the narrowest.

        Masks are set after layers with a bias, on the second dimension of their outputs. Not every
        network can be written like that.
        """
        super().check()
        spec = self.whole.spec
        if spec.channels is not None or spec.built_with is None:
            return
        widest = max(self.sizes, key=lambda size: self.rates[size])
        narrowest = min(self.sizes, key=lambda size: self.rates[size])
        state = random_state(self.initial(0))
        inputs = random_inputs(spec.built_with.shape, 2)
        results = []
        for size in (widest, narrowest):
            model = self._initialized(size, seed=0).eval()
            model.load_state_dict(take(state, self.part(size)))
            try:
                with torch.no_grad(), at_width(model, torch.tensor([0])):
                    results.append(model(inputs))
            except RuntimeError:  # a mask does not fit the output it is multiplied with
                break
        if len(results) < 2 or not close(*results):
            raise MotleyError(
                f"split.name = 'ordered': {self.architecture!r} does not compute the same at its "
                "smallest width as a network of this width. It is for convolutions and linear "
                "layers with the channels in the second dimension. Use split.name = 'width'."
            )

    def _inside(self, rate: float) -> list[float]:
        """Return the rates at which a size of this rate can run. Its own is the last."""
        return sorted(inner for inner in self.settings.rates if inner <= rate)

    def _placed(self, size: str, name: str) -> str:
        return name

    def _piece(self, size: str, name: str, chosen: Mapping[str, slice | Tensor | None]) -> Piece:
        piece = super()._piece(size, name, chosen)
        rows = len(self._inside(self.rates[size]))
        if not name.endswith(ROWS) or (rows == len(self.rates) and piece.index is None):
            return piece
        return Piece(name, (slice(0, rows), *(piece.index or (slice(None),))))

    @cached_property
    def meta_state(self) -> State:
        """All tensors of the global state, without values. Statistics have one row per width."""
        state = {}
        for name, tensor in self.without_private(self.whole.module.state_dict()).items():
            state[name] = self._rows(tensor) if name.endswith(ROWS) else tensor
        return state

    def _rows(self, like: Tensor) -> Tensor:
        return torch.empty((len(self.rates), *like.shape), dtype=like.dtype, device="meta")

    def initial(self, seed: int) -> State:
        """Return the initial weights of the whole model, and initial statistics."""
        whole = self._drawn(self.whole.build, seed).state_dict()
        state = {}
        for name, tensor in self.meta_state.items():
            state[name] = initial_statistics(name, tensor) if name.endswith(ROWS) else whole[name]
        return state
