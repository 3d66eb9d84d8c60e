"""Residual networks, He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016).

A block computes relu(f(x) + s(x)), where s is the identity or, if the shape changes, a 1x1
convolution and a norm. A stem is followed by four stages of such blocks, global average pooling and
a linear layer. The sizes are nested: the tensors of a shallower network are a subset of a deeper
network's, with the same names and shapes (10 in 14 in 22 in 26, 10 in 18 in 22), so clients of
different sizes can share one state. Names are torchvision's, so its weights can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from motley.models.channels import Axis, Channels, of_head
from motley.models.initialization import initialize_convolutions
from motley.models.inputs import ImageShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.models.taps import crop_taps
from motley.settings import Settings

LAYERS = ("layer1", "layer2", "layer3", "layer4")
STAGES = (
    Stage("stem", members=("conv1", "bn1")),
    *(Stage(layer) for layer in LAYERS),
    Stage("pool", members=()),
    Stage("head", "fc"),
)
STAGE_WIDTHS = (64, 128, 256, 512)
Pair: TypeAlias = tuple[Tensor, Tensor]


class ResNetSettings(Settings):
    """Settings of all ResNets."""

    stem: Literal["imagenet", "cifar"] = "imagenet"
    """imagenet: 7x7 convolution of stride 2, then 3x3 max pooling of stride 2. cifar: 3x3
    convolution of stride 1, no pooling.
    """
    width: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the 64, 128, 256 and 512 channels of the four stages."""
    norm: Literal["batch", "group"] = "batch"
    """batch: batch norm, whose running statistics are exchanged too. group: group norm, without
    running statistics.
    """
    groups: int = Field(2, ge=1)
    """Number of channel groups of group norm."""

    trim_dead_taps: bool = False
    """Leave out kernel taps that only see padding at this image size. The function and its training
    stay the same, with fewer weights.
    """

    @field_validator("groups")
    @classmethod
    def _groups_divide_every_stage(cls, groups: int, info: ValidationInfo) -> int:
        if info.data.get("norm") == "group" and "width" in info.data:
            widths = stage_widths(info.data["width"])
            if any(width % groups for width in widths):
                counts = ", ".join(map(str, widths))
                raise ValueError(
                    "must divide the channels of every stage; "
                    f"width {info.data['width']} gives {counts}"
                )
        return groups


def stage_widths(width: float) -> tuple[int, ...]:
    """Return the channels of the four stages. A bottleneck stage outputs four times as many."""
    return tuple(max(1, round(channels * width)) for channels in STAGE_WIDTHS)


class Block(nn.Module):
    """Base class of both block types: relu(f(x) + s(x)) with s = identity or `downsample`."""

    expansion: int
    convolutions: int
    downsample: nn.Sequential | None

    def shortcut(self, x: Tensor) -> Tensor:
        """Return s(x)."""
        return x if self.downsample is None else self.downsample(x)

    def helped_by(self, first: Block) -> Iterator[Pair]:
        """Yield (a weight of the stage's first block, the weight of this block that it helps)."""
        raise NotImplementedError


class BasicBlock(Block):
    """Two 3x3 convolutions; the first has the stride."""

    expansion = 1
    convolutions = 2

    def __init__(self, inputs: int, width: int, stride: int, settings: ResNetSettings) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = _norm(width, settings)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = _norm(width, settings)
        self.downsample = _downsample(inputs, width, stride, settings)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))

    def helped_by(self, first: Block) -> Iterator[Pair]:
        assert isinstance(first, BasicBlock)
        yield first.conv2.weight, self.conv1.weight
        yield first.conv2.weight, self.conv2.weight


class Bottleneck(Block):
    """1x1 down, 3x3 with the stride, 1x1 up to four times the width."""

    expansion = 4
    convolutions = 3

    def __init__(self, inputs: int, width: int, stride: int, settings: ResNetSettings) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = _norm(width, settings)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = _norm(width, settings)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = _norm(outputs, settings)
        self.downsample = _downsample(inputs, outputs, stride, settings)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))

    def helped_by(self, first: Block) -> Iterator[Pair]:
        assert isinstance(first, Bottleneck)
        ours, theirs = ((block.conv1, block.conv2, block.conv3) for block in (self, first))
        for mine, other in zip(ours, theirs, strict=True):
            if mine.weight.shape == other.weight.shape:
                yield other.weight, mine.weight


class ResNet(nn.Module):
    """A stem, four stages of blocks, global average pooling, and the head `fc`.

    On 32x32 images the imagenet stem leaves an 8x8 map and stage 4 a 1x1 map. On that map a padded
    3x3 convolution of stride 1 sees zeros at all taps but its center, so eight ninths of its
    weights never get a gradient. InCo and FedIN nevertheless published results with this stem.
    """

    def __init__(
        self,
        block: type[Block],
        blocks: Sequence[int],
        settings: ResNetSettings,
        channels: int,
        classes: int,
    ) -> None:
        super().__init__()
        widths = stage_widths(settings.width)
        large = settings.stem == "imagenet"
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(
            channels, widths[0], kernel, stride=stride, padding=kernel // 2, bias=False
        )
        self.bn1 = _norm(widths[0], settings)
        self.relu: nn.Module = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        outputs = [width * block.expansion for width in widths]
        inputs = [widths[0], *outputs[:-1]]
        make = partial(_stage, block, settings)
        self.layer1, self.layer2, self.layer3, self.layer4 = map(
            make, inputs, widths, blocks, (1, 2, 2, 2)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs[-1], classes)
        initialize_convolutions(self)

    @property
    def stages(self) -> tuple[nn.Sequential, ...]:
        """Return the four stages in order."""
        return self.layer1, self.layer2, self.layer3, self.layer4

    def stem(self, x: Tensor) -> Tensor:
        """Return the input of stage 1."""
        return self.maxpool(self.relu(self.bn1(self.conv1(x))))

    def pool(self, x: Tensor) -> Tensor:
        """Return the mean over the map: one vector per image."""
        return self.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(self.pool(x))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair each stage's first block with its later ones (InCo, Section 3.2).

    With basic blocks, "layer 0" is conv2 of the first block for both convolutions of every later
    block, because conv1 of the first block changes the width. In stage 1 it does not, but InCo's
    published code takes conv2 there too. The paper defines no pairs for bottlenecks. We pair each
    convolution of the first block with the convolution at the same position of later blocks if
    their shapes are equal, which is the case for conv2 and conv3.
    """
    assert isinstance(model, ResNet)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    pairs = []
    for stage in model.stages:
        for source, target in _pairs(stage):
            pairs.append(CrossLayer(names[source], names[target]))
    return pairs


def _pairs(stage: nn.Sequential) -> Iterator[Pair]:
    first, *later = (block for block in stage if isinstance(block, Block))
    for block in later:
        yield from block.helped_by(first)


def channels(model: nn.Module) -> Channels:
    """Return the streams: one per stage, and one per convolution inside a block.

    A stage's stream runs through its shortcuts and block outputs. The stem writes the stream of
    stage 1, unless the stage begins with a convolution on its shortcut (bottlenecks).
    """
    assert isinstance(model, ResNet)
    first_block = next(iter(model.layer1))
    stem_stream = "layer1" if first_block.downsample is None else "stem"
    read = Axis(stem_stream, model.conv1.out_channels)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {"conv1": (read, None), "bn1": (read,)}
    for number, stage in enumerate(model.stages, 1):
        for block_number, block in enumerate(stage):
            assert isinstance(block, Block)
            name = f"layer{number}.{block_number}"
            layer_channels |= _block_channels(block, name, f"layer{number}", read)
            read = layer_channels[f"{name}.bn{block.convolutions}"][0] or read
    return {**layer_channels, **of_head("fc", model.fc, read)}


def _block_channels(
    block: Block, name: str, stream: str, read: Axis
) -> dict[str, tuple[Axis | None, ...]]:
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    block_input = read
    for number in range(1, block.convolutions + 1):
        last = number == block.convolutions
        width = getattr(block, f"conv{number}").out_channels
        written = Axis(stream if last else f"{name}.conv{number}", width)
        layer_channels[f"{name}.conv{number}"] = (written, read)
        layer_channels[f"{name}.bn{number}"] = (written,)
        read = written
    if block.downsample is not None:
        layer_channels[f"{name}.downsample.0"] = (read, block_input)
        layer_channels[f"{name}.downsample.1"] = (read,)
    return layer_channels


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _norm(channels: int, settings: ResNetSettings) -> nn.Module:
    if settings.norm == "group":
        return nn.GroupNorm(settings.groups, channels)
    return nn.BatchNorm2d(channels)


def _downsample(
    inputs: int, outputs: int, stride: int, settings: ResNetSettings
) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(outputs, settings))


def _stage(
    block: type[Block], settings: ResNetSettings, inputs: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    outputs = width * block.expansion
    later = (block(outputs, width, 1, settings) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride, settings), *later)


#: Depth -> block type, blocks per stage, and number of parameters for 3 channels, 10 classes and
#: the default settings.
SIZES: dict[int, tuple[type[Block], tuple[int, int, int, int], int]] = {
    10: (BasicBlock, (1, 1, 1, 1), 4_910_922),
    14: (BasicBlock, (1, 1, 2, 2), 10_812_234),
    18: (BasicBlock, (2, 2, 2, 2), 11_181_642),
    22: (BasicBlock, (2, 2, 3, 3), 17_082_954),
    26: (BasicBlock, (3, 3, 3, 3), 17_452_362),
    34: (BasicBlock, (3, 4, 6, 3), 21_289_802),
    50: (Bottleneck, (3, 4, 6, 3), 23_528_522),
    101: (Bottleneck, (3, 4, 23, 3), 42_520_650),
    152: (Bottleneck, (3, 8, 36, 3), 58_164_298),
}


def _build(depth: int, settings: ResNetSettings, image: ImageShape, classes: int) -> ResNet:
    image = expect(image, ImageShape, f"resnet{depth}")
    block, blocks, _ = SIZES[depth]
    return ResNet(block, blocks, settings, image.channels, classes)


def _trim(model: nn.Module, settings: ResNetSettings, image: ImageShape, classes: int) -> None:
    if settings.trim_dead_taps:
        crop_taps(model, image)


def _register(depth: int) -> None:
    block, blocks, parameters = SIZES[depth]
    block_type = "basic" if block is BasicBlock else "bottleneck"
    summary = (
        f"{block_type} blocks {'-'.join(map(str, blocks))}, {parameters:,} parameters "
        "(3 channels, 10 classes)"
    )
    register = MODELS.register(f"resnet{depth}", summary, paper="He et al., CVPR 2016")
    paths = []
    for layer, count in zip(LAYERS, blocks, strict=True):
        paths += [f"{layer}.{number}" for number in range(count)]
    register(
        ModelSpec(
            partial(_build, depth),
            "resnet",
            STAGES,
            tuple(paths),
            channels,
            cross_layers,
            head="fc",
            after_init=_trim,
        )
    )


for _depth in SIZES:
    _register(_depth)
