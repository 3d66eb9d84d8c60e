"""VGG networks for small images.

Simonyan and Zisserman, "Very Deep Convolutional Networks" (ICLR 2015). Blocks of 3x3 convolutions,
each followed by max pooling, and two hidden layers of 512 units. No normalization. These are the
two networks of FedImpro's authors: VGG9, and the usual VGG11 for 32x32 images. They differ in more
than their depth:

- VGG9 has dropout of whole maps after its second block, and dropout of 0.1 before the first hidden
  layer and before the head. Its weights start as torch creates them.
- VGG11 has dropout of 0.5 before each hidden layer. Its convolutions start with variance 2 /
  fan_out and without bias.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.channels import Axis, Channels, of_head
from motley.models.initialization import initialize_convolutions
from motley.models.inputs import ImageShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Fraction, Settings, allowing

#: Number of layers with weights -> the channels of every block's convolutions.
BLOCKS: dict[int, tuple[tuple[int, ...], ...]] = {
    9: ((32, 64), (128, 128), (256, 256)),
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
}
HIDDEN = 512


#: Dropout probability of each network's classifier, as in FedImpro's code.
DROPOUT = {9: 0.1, 11: 0.5}


Dropout: TypeAlias = Annotated[
    Fraction | Literal["auto"], allowing('a number from 0 to below 1, or "auto"')
]


class VGGSettings(Settings):
    """Settings of all VGG networks."""

    dropout: Dropout = "auto"
    """Probability of the two dropouts of the classifier: before the first hidden layer, and before
    the head (VGG9) or the second hidden layer (VGG11). auto: 0.1 in VGG9 and 0.5 in VGG11.
    """
    map_dropout: float = Field(0.05, ge=0, lt=1)
    """Probability of dropping a whole feature map after VGG9's second block."""


class VGG(nn.Module):
    """Blocks of convolutions, two hidden layers, and a head."""

    def __init__(self, depth: int, settings: VGGSettings, image: ImageShape, classes: int) -> None:
        super().__init__()
        image = expect(image, ImageShape, f"vgg{depth}")
        blocks = BLOCKS[depth]
        self.blocks = nn.ModuleList()
        inputs = image.channels
        for widths in blocks:
            self.blocks.append(_block(inputs, widths))
            inputs = widths[-1]
        if depth == 9:
            self.blocks[1].append(nn.Dropout2d(settings.map_dropout))  # type: ignore[operator]
        values = inputs * _pooled(depth, image.height) * _pooled(depth, image.width)
        dropout = DROPOUT[depth] if settings.dropout == "auto" else settings.dropout
        # In both networks the layers with weights have the numbers 2 and 5.
        self.hidden = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(values, HIDDEN),
            nn.ReLU(),
            nn.Dropout(dropout) if depth == 11 else nn.Identity(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(dropout) if depth == 9 else nn.Identity(),
        )
        self.head = nn.Linear(HIDDEN, classes)
        if depth == 11:
            initialize_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.hidden(x))


def _block(inputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        inputs = width
    return nn.Sequential(*modules, nn.MaxPool2d(2))


def _pooled(depth: int, side: int) -> int:
    smallest = 2 ** len(BLOCKS[depth])
    if side < smallest:
        raise MotleyError(
            f"model 'vgg{depth}': images must be at least {smallest} pixels high and wide, "
            f"not {side}. Set data.transform.resize to at least {smallest}."
        )
    return side // smallest


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Return no pairs: InCo's authors define none for networks without shortcuts."""
    return []


def channels(model: nn.Module) -> Channels:
    """Return the streams: one per layer, which the next layer reads.

    The first hidden layer reads every pixel of a map.
    """
    assert isinstance(model, VGG)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    read = None
    for name, layer in model.named_modules():
        if not name.startswith("head") and isinstance(layer, nn.Conv2d | nn.Linear):
            written, inputs = Axis(name, layer.weight.shape[0]), layer.weight.shape[1]
            layer_channels[name] = (written, read and read._replace(inner=inputs // read.width))
            read = written
    assert read is not None
    return {**layer_channels, **of_head("head", model.head, read)}


#: Number of layers -> number of parameters, for 3x32x32 images and 10 classes.
PARAMETERS = {9: 3_491_530, 11: 9_750_922}


def _register(depth: int) -> None:
    summary = (
        f"VGG of {depth} layers, no normalization; {PARAMETERS[depth]:,} parameters "
        "(3x32x32 images, 10 classes)"
    )
    register = MODELS.register(f"vgg{depth}", summary, paper="Simonyan and Zisserman, ICLR 2015")
    blocks = tuple(f"blocks.{number}" for number in range(len(BLOCKS[depth])))
    stages = [Stage(f"block{number}", block) for number, block in enumerate(blocks, 1)]
    stages += [Stage("hidden"), Stage("head")]
    register(
        ModelSpec(
            partial(VGG, depth), "vgg", tuple(stages), blocks, channels, cross_layers, head="head"
        )
    )


for _depth in PARAMETERS:
    _register(_depth)
