"""Multilayer perceptrons: one to three hidden layers of ReLU units over the flattened input.

A size is a number of hidden layers, all of the same width. The first hidden layer reads the input,
and all later ones have the same shape, so the tensors of a shallower network are a subset of a
deeper network's, with the same names and shapes.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import InputShape, TokenShape, dims_of
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class MLPSettings(Settings):
    """Settings of all MLPs."""

    hidden: int = Field(64, ge=1)
    """Number of units per hidden layer."""


class MLP(nn.Module):
    """Hidden layers over the flattened input, and a head."""

    def __init__(self, depth: int, settings: MLPSettings, shape: InputShape, classes: int) -> None:
        super().__init__()
        if isinstance(shape, TokenShape):
            raise MotleyError(
                f"model.sizes: 'mlp{depth}' takes numbers, and the data set has token sequences."
            )
        widths = (math.prod(dims_of(shape)), *(settings.hidden for _ in range(depth)))
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(settings.hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.layers)):
            x = hidden(self, x, number)
        return self.head(x)


def hidden(model: MLP, x: Tensor, number: int) -> Tensor:
    """Apply one hidden layer to the output of the layer before it, or to images."""
    return F.relu(model.layers[number](x.flatten(1)))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the second hidden layer with each later one (InCo, Section 3.2).

    These are the hidden layers of equal shape; the first one reads the image.
    """
    assert isinstance(model, MLP)
    return [
        CrossLayer("layers.1.weight", f"layers.{depth}.weight")
        for depth in range(2, len(model.layers))
    ]


def channels(model: nn.Module) -> Channels:
    """Return the streams: one per hidden layer."""
    assert isinstance(model, MLP)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    read = None
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, nn.Linear)
        written = Axis(f"layers.{number}", layer.out_features)
        layer_channels[f"layers.{number}"] = (written, read)
        read = written
    assert read is not None
    return {**layer_channels, **of_head("head", model.head, read)}


#: Number of hidden layers -> number of parameters, for 3x32x32 images, 10 classes and the default
#: settings.
SIZES = {1: 197_322, 2: 201_482, 3: 205_642}


def _register(depth: int) -> None:
    layers = f"{depth} hidden layer{'s' * (depth > 1)}"
    summary = f"perceptron of {layers}, {SIZES[depth]:,} parameters (3x32x32 images, 10 classes)"
    blocks = tuple(f"layers.{number}" for number in range(depth))
    stages = [
        Stage(f"layer{at}", partial(hidden, number=at), (block,)) for at, block in enumerate(blocks)
    ]
    spec = ModelSpec(
        partial(MLP, depth),
        "mlp",
        (*stages, Stage("head")),
        blocks,
        channels,
        cross_layers,
        head="head",
    )
    MODELS.register(f"mlp{depth}", summary)(spec)


for _depth in SIZES:
    _register(_depth)
