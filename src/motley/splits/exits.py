"""Early exits: classifiers along a network, so that a size may end at any of them.

A network with exits returns logits at each of its cuts; its own output is that of the last exit.
ScaleFL and DepthFL train all exits that a client has, and a client with fewer blocks ends at an
earlier exit. A cut is a number of blocks: exit i comes after the first `cuts[i]` blocks. The last
exit of the whole network is its ordinary head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.channels import CLASSES, Axis, Channels
from motley.models.facts import blocks_of
from motley.models.resnet import ResNet
from motley.models.spec import declare, spec_of
from motley.models.vit import ViT


class ConvolutionHead(nn.Module):
    """ScaleFL's head: three 3x3 convolutions with norm and ReLU, pooling, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return self.classify(F.adaptive_avg_pool2d(x, 1).flatten(1))


class LinearHead(nn.Module):
    """Average pooling of a map, or a layer norm of the class token, and a linear layer."""

    def __init__(self, channels: int, classes: int, tokens: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6) if tokens else None
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(x, 1).flatten(1) if self.norm is None else self.norm(x)[:, 0]
        return self.classify(x)


class WithExits(nn.Module):
    """A network with exits, made from an ordinary network.

    It takes over the modules and parameters of that network under their names.
    """

    #: Number of blocks before each exit.
    cuts: tuple[int, ...]
    exits: nn.ModuleList
    #: Return the mean over all exits instead of the output of the deepest one.
    ensemble: bool

    def __init__(self, network: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, parameter in network.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in network.named_children():
            self.add_module(name, child)

    def enter(self, x: Any) -> Tensor:
        """Return the input of the first block."""
        raise NotImplementedError

    def block_chain(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return the blocks in order, as functions of the output of the block before.

        Cuts count these functions. A layer between two blocks belongs to one of them.
        """
        return [parent[number] for parent, number, _ in _blocks(self)]

    def own_head(self, x: Tensor) -> Tensor:
        """Return the logits of the ordinary head."""
        raise NotImplementedError

    def logits_at(self, number: int, x: Tensor) -> Tensor:
        """Return the logits of an exit, counted from 0, for the output of the block before it."""
        # The whole network has one cut more than exit heads: its last exit is the ordinary head.
        if number < len(self.exits):
            logits: Tensor = self.exits[number](x)
            return logits
        return self.own_head(x)

    def exit_logits(self, x: Tensor) -> list[Tensor]:
        """Return the logits of all exits, the deepest last."""
        logits = []
        x = self.enter(x)
        for number, block in enumerate(self.block_chain(), 1):
            x = block(x)
            if number in self.cuts:
                logits.append(self.logits_at(self.cuts.index(number), x))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the deepest exit, or the mean over all exits."""
        logits = self.exit_logits(x)
        if self.ensemble:
            return sum(logits[1:], logits[0]) / len(logits)
        return logits[-1]


class ResNetWithExits(WithExits, ResNet):
    """A residual network with exits after blocks."""

    def enter(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def own_head(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(x))


class ViTWithExits(WithExits, ViT):
    """A vision transformer with exits after blocks."""

    def enter(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def own_head(self, x: Tensor) -> Tensor:
        return self.head(self.class_token(x))


def exit_logits_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return a model's logits, one tensor per exit. An ordinary model has one exit."""
    return model.exit_logits(images) if isinstance(model, WithExits) else [model(images)]


def _blocks(model: nn.Module) -> list[tuple[nn.Sequential, int, str]]:
    """Return every block as (its parent module, its index there, the stream it writes)."""
    if isinstance(model, ResNet):
        blocks: list[tuple[nn.Sequential, int, str]] = []
        for stage_number, stage in enumerate(model.stages, 1):
            blocks += [(stage, number, f"layer{stage_number}") for number in range(len(stage))]
        return blocks
    if isinstance(model, ViT):
        return [(model.blocks, number, "token") for number in range(len(model.blocks))]
    raise TypeError(f"{type(model).__name__} is neither a ResNet nor a ViT")


def add_exits(
    network: nn.Module, cuts: Sequence[int], level: int, head: str, ensemble: bool
) -> WithExits:
    """Turn an ordinary network into one with exits that ends at exit number `level`.

    Blocks after that exit are removed, and so is the ordinary head unless it is the last exit.
    `network` is taken apart and must not be used afterwards.
    """
    blocks, spec = _blocks(network), spec_of(network)
    ordinary_head = network.get_submodule(spec.head) if spec.head else None
    if not isinstance(ordinary_head, nn.Linear):
        raise MotleyError(
            "model.projection: needs a network with one head, and split.name = 'grid' has several. "
            "Use 0."
        )
    heads = []
    for cut in cuts[: level + 1]:
        if cut < len(blocks):
            width = _width(network, *blocks[cut - 1][:2])
            heads.append(_head(head, width, ordinary_head.out_features, isinstance(network, ViT)))
    for parent, number, _ in reversed(blocks[cuts[level] :]):
        del parent[number]
    is_whole = cuts[level] == len(blocks)
    if not is_whole:
        for name in ("fc",) if isinstance(network, ResNet) else ("norm", "head"):
            delattr(network, name)
    model = ResNetWithExits(network) if isinstance(network, ResNet) else ViTWithExits(network)
    model.cuts = tuple(cuts[: level + 1])
    model.exits = nn.ModuleList(heads)
    model.ensemble = ensemble
    classifiers = [f"exits.{number}.classify" for number in range(len(heads))]
    if is_whole and spec.head:
        classifiers.append(spec.head)
    # A network with exits branches, so it is not a chain of stages.
    branched = replace(
        spec,
        stages=None,
        blocks=blocks_of(network)[: cuts[level]],
        head=spec.head if is_whole else None,
        classifiers=tuple(classifiers),
    )
    declare(model, branched)
    return model


def _width(model: nn.Module, parent: nn.Sequential, number: int) -> int:
    """Return the number of channels that a block outputs."""
    if isinstance(model, ViT):
        return int(model.cls_token.shape[-1])
    children = parent[number].named_children()
    convolutions = [module for name, module in children if name.startswith("conv")]
    last = convolutions[-1]
    assert isinstance(last, nn.Conv2d)
    return last.out_channels


def _head(name: str, width: int, classes: int, tokens: bool) -> nn.Module:
    if name == "convolution" and not tokens:
        return ConvolutionHead(width, classes)
    return LinearHead(width, classes, tokens)


def exit_channels(model: nn.Module) -> Channels:
    """Return the channels of a network's exits.

    Each exit reads the stream of its block; each of its convolutions writes a stream of its own.
    """
    assert isinstance(model, WithExits)
    blocks = _blocks(model)
    layer_channels: dict[str, tuple[Axis | None, ...]] = {}
    for number, (cut, head) in enumerate(zip(model.cuts, model.exits, strict=False)):
        assert isinstance(head.classify, nn.Linear)
        name, read = f"exits.{number}", Axis(blocks[cut - 1][2], head.classify.in_features)
        for layer in range(3) if isinstance(head, ConvolutionHead) else ():
            written = Axis(f"{name}.{layer}", read.width)
            layer_channels[f"{name}.convs.{layer}"] = (written, read)
            layer_channels[f"{name}.norms.{layer}"] = (written,)
            read = written
        logits = Axis(CLASSES, head.classify.out_features)
        layer_channels[f"{name}.norm"] = (read,)
        layer_channels[f"{name}.classify"] = (logits, read)
    return layer_channels
