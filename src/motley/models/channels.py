"""Which channels of a model belong together: the one thing a family declares so that it can be split in width.

Channels travel in *streams*. Every layer writes one stream and reads another, and whatever is added up shares one: the
blocks of a stage and the shortcuts around them are a single stream, so a narrower model that keeps the same channels of
a stream everywhere is a model. Leading, rolling and random channels all follow from what is declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from motley.models.heads import ProjectionHead

CLASSES = "classes"
"""The stream of a classifier's answers, which no split makes narrower."""


class Axis(NamedTuple):
    """A dimension of a tensor: `repeats` times over, the channels of a stream, each of them `inner` numbers long."""

    stream: str
    width: int
    repeats: int = 1
    inner: int = 1


Channels: TypeAlias = Mapping[str, tuple[Axis | None, ...]]
"""Layer or parameter -> the streams of its tensors' first dimensions: (written, read) for most layers. None is for what
is no stream, as the image's colours are.
"""


def of_head(name: str, head: nn.Module, read: Axis) -> dict[str, tuple[Axis | None, ...]]:
    """Return the channels of a last layer, with or without a projection before it."""
    if isinstance(head, ProjectionHead):
        first, last = head.project[0], head.project[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        hidden, projected = Axis(f"{name}.hidden", first.out_features), Axis(f"{name}.projected", last.out_features)
        before = {f"{name}.project.0": (hidden, read), f"{name}.project.2": (projected, hidden)}
        return {**before, **of_head(f"{name}.classify", head.classify, projected)}
    assert isinstance(head, nn.Linear)
    return {name: (Axis(CLASSES, head.out_features), read)}


def axes(channels: Channels, state: Mapping[str, Tensor]) -> dict[str, tuple[Axis | None, ...]]:
    """Return the streams of every tensor of a state, a dimension each."""
    found = {}
    for name, tensor in state.items():
        declared = channels.get(name) or channels.get(name.rpartition(".")[0]) or ()
        found[name] = (*declared, *(None,) * tensor.dim())[: tensor.dim()]
    return found


def positions(axis: Axis, chosen: slice | Tensor) -> slice | Tensor:
    """Return where the chosen channels of a stream lie along one of its dimensions."""
    if axis.repeats == axis.inner == 1:
        return chosen
    if isinstance(chosen, slice) and axis.repeats == 1:
        return slice(chosen.start * axis.inner, chosen.stop * axis.inner)
    every = torch.arange(axis.repeats * axis.width * axis.inner).view(axis.repeats, axis.width, axis.inner)
    return every[:, chosen].flatten()
