"""Residual networks for signals: 1-D convolutions over (channels, length), such as sensor data.

A stem of kernel 7 and stride 2 is followed by residual blocks of one width. A size is a number of
blocks, and each size has the first blocks of the next one. All convolutions in blocks have the same
shape, so all of them are pairs for cross-layer gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from motley.models.channels import Axis, Channels, of_head
from motley.models.initialization import initialize_convolutions
from motley.models.inputs import InputShape, SignalShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class CNN1dSettings(Settings):
    """Settings of all 1-D CNNs."""

    width: int = Field(64, ge=1)
    """Number of channels."""
    kernel: int = Field(5, ge=1)
    """Kernel size of the convolutions in blocks; an odd number."""
    norm: Literal["batch", "group"] = "batch"
    """batch: batch norm, whose running statistics are exchanged too. group: group norm, without
    running statistics.
    """
    groups: int = Field(2, ge=1)
    """Number of channel groups of group norm."""

    @field_validator("kernel")
    @classmethod
    def _kernel_has_a_middle(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError("must be odd")
        return kernel

    @field_validator("groups")
    @classmethod
    def _groups_divide_width(cls, groups: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if info.data.get("norm") == "group" and width is not None and width % groups:
            raise ValueError(f"must divide width = {width}")
        return groups


class Block(nn.Module):
    """relu(x + f(x)), where f is two convolutions with norms and a ReLU between them."""

    def __init__(self, settings: CNN1dSettings) -> None:
        super().__init__()
        width, kernel = settings.width, settings.kernel
        self.conv1 = nn.Conv1d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm1 = _norm(settings)
        self.conv2 = nn.Conv1d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm2 = _norm(settings)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class CNN1d(nn.Module):
    """A stem, residual blocks, the mean over time, and a head."""

    def __init__(
        self, depth: int, settings: CNN1dSettings, signal: InputShape, classes: int
    ) -> None:
        super().__init__()
        signal = expect(signal, SignalShape, f"cnn1d-{depth}")
        self.conv = nn.Conv1d(signal.channels, settings.width, 7, stride=2, padding=3, bias=False)
        self.norm = _norm(settings)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(depth)))
        self.head = nn.Linear(settings.width, classes)
        initialize_convolutions(self)

    def stem(self, x: Tensor) -> Tensor:
        """Return the input of the first block."""
        return F.relu(self.norm(self.conv(x)))

    def pool(self, x: Tensor) -> Tensor:
        """Return the mean over time: one vector per signal."""
        return x.mean(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))))


def _norm(settings: CNN1dSettings) -> nn.Module:
    if settings.norm == "group":
        return nn.GroupNorm(settings.groups, settings.width)
    return nn.BatchNorm1d(settings.width)


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair conv2 of the first block with both convolutions of every later one, as in a ResNet."""
    assert isinstance(model, CNN1d)
    pairs = []
    for number in range(1, len(model.blocks)):
        for layer in ("conv1", "conv2"):
            pairs.append(CrossLayer("blocks.0.conv2.weight", f"blocks.{number}.{layer}.weight"))
    return pairs


def channels(model: nn.Module) -> Channels:
    """Return the streams: one through all blocks, and one inside of each block."""
    assert isinstance(model, CNN1d)
    stream = Axis("blocks", model.conv.out_channels)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {
        "conv": (stream, None),
        "norm": (stream,),
        **of_head("head", model.head, stream),
    }
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name = f"blocks.{number}"
        inside = Axis(f"{name}.conv1", block.conv1.out_channels)
        layer_channels |= {
            f"{name}.conv1": (inside, stream),
            f"{name}.norm1": (inside,),
            f"{name}.conv2": (stream, inside),
            f"{name}.norm2": (stream,),
        }
    return layer_channels


#: Number of blocks -> number of parameters, for 9 channels, 6 classes and the default settings.
SIZES = {1: 45_766, 2: 86_982, 3: 128_198, 4: 169_414, 6: 251_846}


def _register(depth: int) -> None:
    summary = f"1-D CNN of {depth} blocks, {SIZES[depth]:,} parameters (9 channels, 6 classes)"
    blocks = tuple(f"blocks.{number}" for number in range(depth))
    stages = (
        Stage("stem", members=("conv", "norm")),
        *(Stage(f"block{number}", block) for number, block in enumerate(blocks)),
        Stage("pool", members=()),
        Stage("head"),
    )
    spec = ModelSpec(
        partial(CNN1d, depth), "cnn1d", stages, blocks, channels, cross_layers, head="head"
    )
    MODELS.register(f"cnn1d-{depth}", summary.replace("1 blocks", "1 block"))(spec)


for _depth in SIZES:
    _register(_depth)
