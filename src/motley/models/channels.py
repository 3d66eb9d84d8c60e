"""Which channels of a model belong together: a family declares this to be split in width.

Channels form *streams*. Every layer writes one stream and reads another, and tensors that are added
share a stream: the blocks of a stage and the shortcuts around them are a single stream. A narrower
model that keeps the same channels of a stream in every layer is therefore well formed. Leading,
rolling and random channels all follow from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from motley.models.heads import ProjectionHead

#: The stream of a classifier's logits. No split makes it narrower.
CLASSES = "classes"


class Axis(NamedTuple):
    """One dimension of a tensor that holds the channels of a stream.

    Its indices are (repeat, channel, inner position), flattened in this order: the channels occur
    `repeats` times, and each of them has `inner` values.
    """

    stream: str
    width: int
    repeats: int = 1
    inner: int = 1


#: Layer or parameter -> the streams of its tensors' first dimensions: (written, read) for most
#: layers. None marks dimensions that are no stream, such as the color channels of an image.
Channels: TypeAlias = Mapping[str, tuple[Axis | None, ...]]


def of_head(name: str, head: nn.Module, read: Axis) -> dict[str, tuple[Axis | None, ...]]:
    """Return the channels of a last layer, with or without a projection before it."""
    if isinstance(head, ProjectionHead):
        first, last = head.project[0], head.project[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        hidden = Axis(f"{name}.hidden", first.out_features)
        projected = Axis(f"{name}.projected", last.out_features)
        projection = {f"{name}.project.0": (hidden, read), f"{name}.project.2": (projected, hidden)}
        return {**projection, **of_head(f"{name}.classify", head.classify, projected)}
    assert isinstance(head, nn.Linear)
    return {name: (Axis(CLASSES, head.out_features), read)}


def axes(channels: Channels, state: Mapping[str, Tensor]) -> dict[str, tuple[Axis | None, ...]]:
    """Return the stream of each dimension of every tensor of a state."""
    axes_of_tensors = {}
    for name, tensor in state.items():
        declared = channels.get(name) or channels.get(name.rpartition(".")[0]) or ()
        # Padded with None to the tensor's number of dimensions; a bias has only the first of them.
        axes_of_tensors[name] = (*declared, *(None,) * tensor.dim())[: tensor.dim()]
    return axes_of_tensors


def positions(axis: Axis, chosen: slice | Tensor) -> slice | Tensor:
    """Return the indices of the chosen channels of a stream along one of its dimensions."""
    if axis.repeats == axis.inner == 1:
        return chosen
    if isinstance(chosen, slice) and axis.repeats == 1:
        return slice(chosen.start * axis.inner, chosen.stop * axis.inner)
    shape = (axis.repeats, axis.width, axis.inner)
    indices = torch.arange(math.prod(shape)).view(shape)
    return indices[:, chosen].flatten()
