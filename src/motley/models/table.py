"""Networks for rows of a table: numeric columns, and categories that are embedded.

`logistic` is logistic (or linear) regression on the numbers and one-hot categories. `table1` to
`table3` are perceptrons of one to three hidden layers over the numbers and the embeddings of all
categories. A size is a number of hidden layers; `table1` to `table3` are parts of each other, and
`logistic` shares nothing with them.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import InputShape, TableShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class TableSettings(Settings):
    """Settings of all networks for tables."""

    hidden: int = Field(64, ge=1)
    """Number of units per hidden layer."""
    embedding: int = Field(8, ge=1)
    """Largest dimension of a category's embedding. A category of n values has at most n
    dimensions.
    """
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of the hidden units."""


class LogisticRegression(nn.Module):
    """A linear layer over the numbers and one-hot categories."""

    def __init__(self, settings: TableSettings, shape: InputShape, classes: int) -> None:
        super().__init__()
        shape = expect(shape, TableShape, "logistic")
        self.numbers, self.categories = shape.numbers, shape.categories
        self.head = nn.Linear(shape.numbers + sum(shape.categories), classes)

    def columns(self, x: Tensor) -> Tensor:
        """Return the numbers, and one column per value of each category."""
        pieces = [x[:, : self.numbers].to(next(self.head.parameters()).dtype)]
        for column, values in enumerate(self.categories, self.numbers):
            numbers = torch.arange(values, device=x.device)
            pieces.append((x[:, column : column + 1] == numbers).to(pieces[0].dtype))
        return torch.cat(pieces, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.columns(x))


class TableNet(nn.Module):
    """Embedded categories beside the numbers, hidden layers of ReLU units, and a head."""

    def __init__(
        self, depth: int, settings: TableSettings, shape: InputShape, classes: int
    ) -> None:
        super().__init__()
        shape = expect(shape, TableShape, f"table{depth}")
        self.numbers = shape.numbers
        embeddings = []
        for values in shape.categories:
            embeddings.append(nn.Embedding(values, min(values, settings.embedding)))
        self.embeddings = nn.ModuleList(embeddings)
        inputs = shape.numbers + sum(embedding.embedding_dim for embedding in embeddings)
        layers = []
        for number in range(depth):
            layers.append(nn.Linear(settings.hidden if number else inputs, settings.hidden))
        self.layers = nn.ModuleList(layers)
        self.drop = nn.Dropout(settings.dropout) if settings.dropout else nn.Identity()
        self.head = nn.Linear(settings.hidden, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the numbers, and the embedding of each category."""
        pieces = [x[:, : self.numbers].to(next(self.head.parameters()).dtype)]
        for column, embedding in enumerate(self.embeddings, self.numbers):
            pieces.append(embedding(x[:, column].long()))
        return torch.cat(pieces, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number in range(len(self.layers)):
            x = hidden(self, x, number)
        return self.head(x)


def hidden(model: TableNet, x: Tensor, number: int) -> Tensor:
    """Apply one hidden layer to the output of the layer before it."""
    return model.drop(F.relu(model.layers[number](x)))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the second hidden layer with each later one (InCo, Section 3.2).

    These are the hidden layers of equal shape; the first one reads the table.
    """
    assert isinstance(model, TableNet)
    pairs = []
    for depth in range(2, len(model.layers)):
        pairs.append(CrossLayer("layers.1.weight", f"layers.{depth}.weight"))
    return pairs


def channels(model: nn.Module) -> Channels:
    """Return the streams: one per hidden layer. Embeddings keep their dimensions in every width."""
    assert isinstance(model, TableNet)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    read = None
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, nn.Linear)
        written = Axis(f"layers.{number}", layer.out_features)
        layer_channels[f"layers.{number}"] = (written, read)
        read = written
    assert read is not None
    return {**layer_channels, **of_head("head", model.head, read)}


#: Number of hidden layers -> number of parameters, for 10 numeric columns, 2 classes and the
#: default settings.
SIZES = {1: 834, 2: 4_994, 3: 9_154}


def _register(depth: int) -> None:
    layers = f"{depth} hidden layer{'s' * (depth > 1)}"
    summary = f"table network of {layers}, {SIZES[depth]:,} parameters (10 numbers, 2 classes)"
    blocks = tuple(f"layers.{number}" for number in range(depth))
    stages = [Stage("embed", members=("embeddings",))]
    for number, block in enumerate(blocks):
        stages.append(Stage(f"layer{number}", partial(hidden, number=number), (block,)))
    spec = ModelSpec(
        partial(TableNet, depth),
        "table",
        (*stages, Stage("head")),
        blocks,
        channels,
        cross_layers,
        head="head",
    )
    MODELS.register(f"table{depth}", summary)(spec)


MODELS.register(
    "logistic", "logistic or linear regression on a table, 22 parameters (10 numbers, 2 classes)"
)(
    ModelSpec(
        LogisticRegression,
        "table",
        (Stage("columns", members=()), Stage("head")),
        head="head",
    )
)
for _depth in SIZES:
    _register(_depth)
