"""HeteroFL's ResNets: norm and ReLU come before each convolution, and a last norm after the blocks.

He et al., "Identity Mappings in Deep Residual Networks" (ECCV 2016). The network that the authors
of HeteroFL, and later those of FedRolex, call ResNet-18 has 1-1-1-2 blocks in its four stages, and
a 3x3 stem without pooling.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from motley.models.channels import Axis, Channels, of_head
from motley.models.initialization import initialize_convolutions
from motley.models.inputs import ImageShape, expect
from motley.models.resnet import stage_widths
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class PreActSettings(Settings):
    """Settings of HeteroFL's pre-activation ResNets."""

    width: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the 64, 128, 256 and 512 channels of the four stages."""


class Block(nn.Module):
    """f(a) + s with a = relu(norm(x)).

    The shortcut s is x itself or, if the shape changes, a 1x1 convolution of a.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        changes = stride > 1 or inputs != width
        self.shortcut = nn.Conv2d(inputs, width, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(F.relu(self.bn2(self.conv1(active)))) + shortcut


class PreActResNet(nn.Module):
    """A stem, blocks, a last norm, global average pooling, and a head."""

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        settings: PreActSettings,
        image: ImageShape,
        classes: int,
    ) -> None:
        super().__init__()
        image = expect(image, ImageShape, "heterofl-resnet18")
        widths = stage_widths(settings.width)
        self.conv1 = nn.Conv2d(image.channels, widths[0], 3, padding=1, bias=False)
        modules = []
        inputs = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            modules.append(Block(inputs, width, 2 if stage else 1))
            modules += [Block(width, width, 1) for _ in range(count - 1)]
            inputs = width
        self.blocks = nn.Sequential(*modules)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.relu: nn.Module = nn.ReLU()
        self.head = nn.Linear(widths[-1], classes)
        initialize_convolutions(self)

    def pool(self, x: Tensor) -> Tensor:
        """Return the mean over the normalized last map: one vector per image."""
        return F.adaptive_avg_pool2d(self.relu(self.norm(x)), 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.conv1(x))))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair conv2 of each stage's first block with both convolutions of the stage's later blocks.

    These are the same pairs as in the other ResNets.
    """
    assert isinstance(model, PreActResNet)
    pairs, first = [], 0
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if number == 0 or block.shortcut is not None:
            first = number
        else:
            source = f"blocks.{first}.conv2.weight"
            pairs += [
                CrossLayer(source, f"blocks.{number}.{layer}.weight")
                for layer in ("conv1", "conv2")
            ]
    return pairs


def channels(model: nn.Module) -> Channels:
    """Return the streams: the blocks of a stage write one, and each block has another inside.

    A stage's stream starts at the block that has a convolution on its shortcut.
    """
    assert isinstance(model, PreActResNet)
    read = Axis("blocks.0", model.conv1.out_channels)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {"conv1": (read, None)}
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name = f"blocks.{number}"
        written = read if block.shortcut is None else Axis(name, block.conv2.out_channels)
        inside = Axis(f"{name}.conv1", block.conv1.out_channels)
        layer_channels |= {
            f"{name}.bn1": (read,),
            f"{name}.conv1": (inside, read),
            f"{name}.bn2": (inside,),
            f"{name}.conv2": (written, inside),
            f"{name}.shortcut": (written, read),
        }
        read = written
    return {**layer_channels, "norm": (read,), **of_head("head", model.head, read)}


#: Blocks per stage.
BLOCKS = (1, 1, 1, 2)
_PATHS = tuple(f"blocks.{number}" for number in range(sum(BLOCKS)))
STAGES = (
    Stage("stem", "conv1"),
    *(Stage(f"block{number}", path) for number, path in enumerate(_PATHS, 1)),
    Stage("pool", members=("norm",)),
    Stage("head"),
)

MODELS.register(
    "heterofl-resnet18",
    "HeteroFL's ResNet-18: pre-activation blocks 1-1-1-2, 9,622,090 parameters "
    "(3 channels, 10 classes)",
    paper="HeteroFL, ICLR 2021",
)(
    ModelSpec(
        partial(PreActResNet, BLOCKS), "preact", STAGES, _PATHS, channels, cross_layers, head="head"
    )
)
