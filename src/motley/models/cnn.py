"""The small CNN of pfl-research's CIFAR-10 benchmark, Granqvist et al. (NeurIPS 2024).

Two 3x3 convolutions without padding, 2x2 max pooling, and a hidden layer of 128 units with dropout
before and after it. There is one size. No two layers have the same shape, so there are no pairs for
cross-layer gradients.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import ImageShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings

#: The smallest image height and width that leave a map after both convolutions and the pooling.
SMALLEST_SIDE = 6


class CNNSettings(Settings):
    """Settings of the model `cnn`."""

    map_dropout: float = Field(0.25, ge=0, lt=1)
    """Dropout probability after pooling."""
    hidden_dropout: float = Field(0.5, ge=0, lt=1)
    """Dropout probability of the hidden units."""


class CNN(nn.Module):
    """Two convolutions and a pooling, a hidden layer, and a head."""

    def __init__(self, settings: CNNSettings, image: ImageShape, classes: int) -> None:
        super().__init__()
        image = expect(image, ImageShape, "cnn")
        self.conv1 = nn.Conv2d(image.channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.map_dropout = nn.Dropout(settings.map_dropout)
        self.hidden = nn.Linear(64 * _pooled(image.height) * _pooled(image.width), 128)
        self.hidden_dropout = nn.Dropout(settings.hidden_dropout)
        self.head = nn.Linear(128, classes)
        _initialize(self)

    def first(self, x: Tensor) -> Tensor:
        """Return the first convolution's map."""
        return F.relu(self.conv1(x))

    def second(self, x: Tensor) -> Tensor:
        """Return the second convolution's map, pooled."""
        return F.max_pool2d(F.relu(self.conv2(x)), 2)

    def vector(self, x: Tensor) -> Tensor:
        """Return the hidden units: one vector per image."""
        return self.hidden_dropout(F.relu(self.hidden(self.map_dropout(x).flatten(1))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.vector(self.second(self.first(x))))


STAGES = (
    Stage("conv1", "first", ("conv1",)),
    Stage("conv2", "second", ("conv2",)),
    Stage("hidden", "vector", ("hidden",)),
    Stage("head"),
)


def _pooled(side: int) -> int:
    if side < SMALLEST_SIDE:
        raise MotleyError(
            f"model 'cnn': images must be at least {SMALLEST_SIDE} pixels high and wide, "
            f"not {side}. Set data.transform.resize to at least {SMALLEST_SIDE}."
        )
    return (side - 4) // 2


def _initialize(model: nn.Module) -> None:
    """Draw weights from Glorot's uniform distribution, as pfl-research does.

    Biases keep torch's initialization.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Return no pairs: no two layers have the same shape."""
    return []


def channels(model: nn.Module) -> Channels:
    """Return the streams: one per convolution, and one for the hidden layer.

    The hidden layer reads every pixel of a map.
    """
    assert isinstance(model, CNN)
    first, second = Axis("conv1", model.conv1.out_channels), Axis("conv2", model.conv2.out_channels)
    hidden = Axis("hidden", model.hidden.out_features)
    return {
        "conv1": (first, None),
        "conv2": (second, first),
        "hidden": (hidden, second._replace(inner=model.hidden.in_features // second.width)),
        **of_head("head", model.head, hidden),
    }


MODELS.register(
    "cnn",
    "two convolutions and a hidden layer, with dropout; 1,626,442 parameters "
    "(3x32x32 images, 10 classes)",
    paper="pfl-research, NeurIPS 2024",
)(ModelSpec(CNN, "cnn", STAGES, (), channels, cross_layers, head="head"))
