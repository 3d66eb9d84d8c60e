"""A model as a chain of named stages, each fed by the one before it: where a method may cut a model.

A family declares its chain; methods take slices of it. FedIN's extractor, intermediate layers and classifier are
`chain[:1]`, `chain[1:-1]` and `chain[-1:]`; FedImpro's low and high level are what lies before and behind a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError


class Stage(NamedTuple):
    """One link of a chain."""

    name: str
    run: Callable[[Tensor], Tensor]
    members: tuple[str, ...] = ()
    """The model's modules and parameters that belong to it, by the beginning of their names."""


Chain = tuple[Stage, ...]


class Staged(nn.Module):
    """`head(features(x))`: the last stage of the chain is the head, and all before it make one vector an image."""

    @property
    def chain(self) -> Chain:
        """Return the stages in order. They are looked up anew every time, for a head may be replaced."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Return what the head is fed: one vector an image."""
        return run(self.chain[:-1], x)

    def forward(self, x: Tensor) -> Tensor:
        return run(self.chain, x)


def chain_of(model: nn.Module) -> Chain:
    """Return a model's stages."""
    if not isinstance(model, Staged):
        raise MotleyError(
            f"model.sizes: {type(model).__name__} declares no chain of stages (motley.models.stages), at which "
            "method.name would cut it. Choose another model, or a method that cuts none."
        )
    return model.chain


def run(stages: Sequence[Stage], x: Tensor) -> Tensor:
    """Return what leaves the last of the stages when `x` enters the first."""
    for stage in stages:
        x = stage.run(x)
    return x


def owned(model: nn.Module, stages: Sequence[Stage]) -> list[str]:
    """Return the names of a model's parameters that belong to some of its stages, in the model's order."""
    members = {member for stage in stages for member in stage.members}
    return [name for name, _ in model.named_parameters() if any(_within(name, member) for member in members)]


def _within(name: str, member: str) -> bool:
    return name == member or name.startswith(f"{member}.")


def shape_behind(stages: Sequence[Stage], image: tuple[int, ...]) -> torch.Size:
    """Return the shape of what leaves a blueprint's stages, of one image: computed without memory."""
    with torch.no_grad():
        return run(stages, torch.empty((2, *image), device="meta")).shape[1:]
