"""LSTM networks for tokens or signals: one to three layers.

Tokens are embedded first, as in the character model of McMahan et al. (AISTATS 2017) and of LEAF:
an embedding of 8 dimensions and layers of 256 units. A size is a number of layers, and each size
has the first layers of the next one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import InputShape, SignalShape, TokenShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings

#: The gates of an LSTM, in the order in which a layer's weights hold them: input, forget, cell and
#: output.
GATES = 4


class LSTMSettings(Settings):
    """Settings of all LSTMs."""

    embedding: int = Field(8, ge=1)
    """Dimension of the embedding of a token. Signals are not embedded."""
    hidden: int = Field(256, ge=1)
    """Number of units per layer."""
    output: Literal["last", "mean", "every"] = "last"
    """The head's input. last: the last position, for one target per sequence. mean: the mean
    over all positions. every: each position, for one target per position.
    """


class LSTMLayer(nn.Module):
    """One layer, with the tensors of `torch.nn.LSTM` under their names.

    `nn.LSTM` moves its weights to one block of memory whenever they are replaced, also for one call
    by `functional_call`. But captured steps and optimizers keep the addresses of weights. So this
    layer never moves them; on a GPU it copies them to one block in each call.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(GATES * hidden, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(GATES * hidden, hidden))
        self.bias_ih_l0 = nn.Parameter(torch.empty(GATES * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(GATES * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch does: uniform, up to 1 / sqrt(units)."""
        bound = 1 / math.sqrt(self.hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def hidden(self) -> int:
        """The number of units."""
        return self.weight_hh_l0.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """(sequences, positions, inputs) -> (sequences, positions, units)."""
        # Not len(x): torch.export would take it for a constant.
        zeros = x.new_zeros(1, x.shape[0], self.hidden)
        weights: tuple[Tensor, ...] = (
            self.weight_ih_l0,
            self.weight_hh_l0,
            self.bias_ih_l0,
            self.bias_hh_l0,
        )
        if x.is_cuda:
            weights = in_one_block(weights)
        with warnings.catch_warnings() if x.is_cuda else nullcontext():
            if x.is_cuda:
                # torch advises to move the weights to one block of memory, see above.
                warnings.filterwarnings("ignore", "RNN module weights are not part of single")
            # Biases, one layer, no dropout, training mode (cuDNN's backward pass needs it), one
            # direction, and the batch first.
            outputs, _, _ = torch.lstm(x, (zeros, zeros), weights, True, 1, 0.0, True, False, True)
        return outputs


def in_one_block(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return copies of tensors that lie one after the other in memory.

    That is how cuDNN wants the weights of a layer. Otherwise it copies them itself, with a warning.
    """
    block = torch.cat([tensor.flatten() for tensor in tensors])
    pieces = block.split([tensor.numel() for tensor in tensors])
    return tuple(piece.view_as(like) for piece, like in zip(pieces, tensors, strict=True))


class LSTM(nn.Module):
    """Embedded tokens, or a signal; LSTM layers; and a head on one position or on all of them."""

    def __init__(self, depth: int, settings: LSTMSettings, shape: InputShape, classes: int) -> None:
        super().__init__()
        self.output = settings.output
        if isinstance(shape, TokenShape):
            self.embedding: nn.Embedding | None = nn.Embedding(shape.vocabulary, settings.embedding)
            inputs = settings.embedding
        else:
            self.embedding, inputs = None, expect(shape, SignalShape, f"lstm{depth}").channels
        layers = []
        for number in range(depth):
            layers.append(LSTMLayer(settings.hidden if number else inputs, settings.hidden))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(settings.hidden, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of layer 0: (sequences, positions, inputs)."""
        if self.embedding is None:
            return x.transpose(1, 2)
        return self.embedding(x)

    def choose(self, x: Tensor) -> Tensor:
        """Return the positions that the head reads, or their mean."""
        if self.output == "last":
            return x[:, -1]
        return x.mean(1) if self.output == "mean" else x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choose(self.layers(self.embed(x))))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the first layer's weights with the weights of later layers, gate by gate.

    If the first layer has another number of inputs, the weights on inputs start from the second.
    """
    assert isinstance(model, LSTM)
    pairs = []
    for name in ("weight_ih_l0", "weight_hh_l0"):
        shapes = [getattr(layer, name).shape for layer in model.layers]
        first = next(number for number, shape in enumerate(shapes) if shape == shapes[-1])
        for number in range(first + 1, len(shapes)):
            source, target = f"layers.{first}.{name}", f"layers.{number}.{name}"
            pairs.append(CrossLayer(source, target, GATES))
    return pairs


def channels(model: nn.Module) -> Channels:
    """Return the streams: the embedding, and the units of each layer, which all its gates share."""
    assert isinstance(model, LSTM)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    read = None
    if model.embedding is not None:
        read = Axis("embedding", model.embedding.embedding_dim)
        layer_channels["embedding"] = (None, read)
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, LSTMLayer)
        name = f"layers.{number}"
        written = Axis(name, layer.hidden)
        gates = written._replace(repeats=GATES)
        layer_channels |= {
            f"{name}.weight_ih_l0": (gates, read),
            f"{name}.weight_hh_l0": (gates, written),
            f"{name}.bias_ih_l0": (gates,),
            f"{name}.bias_hh_l0": (gates,),
        }
        read = written
    assert read is not None
    return {**layer_channels, **of_head("head", model.head, read)}


#: Number of layers -> number of parameters, for 80 tokens, as many classes, and the default
#: settings.
SIZES = {1: 293_584, 2: 819_920, 3: 1_346_256}


def _register(depth: int) -> None:
    layers = f"{depth} layer{'s' * (depth > 1)}"
    summary = f"LSTM of {layers}, {SIZES[depth]:,} parameters (80 tokens, 80 classes)"
    blocks = tuple(f"layers.{number}" for number in range(depth))
    stages = (
        Stage("embed", members=("embedding",)),
        *(Stage(f"layer{number}", block) for number, block in enumerate(blocks)),
        Stage("choose", members=()),
        Stage("head"),
    )
    register = MODELS.register(f"lstm{depth}", summary, paper="McMahan et al., AISTATS 2017")
    register(
        ModelSpec(partial(LSTM, depth), "lstm", stages, blocks, channels, cross_layers, head="head")
    )


for _depth in SIZES:
    _register(_depth)
