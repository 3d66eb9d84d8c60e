"""Early exits: classifiers along a network, so that a size may end at any of them.

A network with exits answers once at each of its cuts; the last answer is its own. ScaleFL and DepthFL train all exits
that a client holds, and a client that holds fewer blocks ends at an earlier one. A cut is a number of blocks: exit i
stands behind the first `cuts[i]` of them. The last exit of the whole network is its ordinary head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.channels import CLASSES, Axis, Channels
from motley.models.resnet import ResNet
from motley.models.spec import declare, spec_of
from motley.models.vit import ViT


class ConvolutionHead(nn.Module):
    """Three 3x3 convolutions, each with a norm and a ReLU, the mean over the map, and a linear layer (ScaleFL)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return self.classify(F.adaptive_avg_pool2d(x, 1).flatten(1))


class LinearHead(nn.Module):
    """The mean over a map, or a class token's norm, and a linear layer."""

    def __init__(self, channels: int, classes: int, tokens: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6) if tokens else None
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(x, 1).flatten(1) if self.norm is None else self.norm(x)[:, 0]
        return self.classify(x)


class WithExits(nn.Module):
    """A network with exits. It is made of an ordinary network, whose modules and parameters it takes over by name."""

    #: Number of blocks before each exit.
    cuts: tuple[int, ...]
    exits: nn.ModuleList
    #: Answer with the mean over all exits instead of the deepest one.
    ensemble: bool

    def __init__(self, network: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, parameter in network.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in network.named_children():
            self.add_module(name, child)

    def hidden(self, x: Any) -> Iterator[Tensor]:
        """Yield what leaves each block."""
        raise NotImplementedError

    def own_head(self, x: Tensor) -> Tensor:
        """Return the answer of the ordinary head."""
        raise NotImplementedError

    def answers(self, x: Tensor) -> list[Tensor]:
        """Return the answers of all exits, the deepest last."""
        heads = dict(zip(self.cuts, self.exits, strict=False))
        found = []
        for number, left in enumerate(self.hidden(x), 1):
            if number in self.cuts:
                found.append(heads[number](left) if number in heads else self.own_head(left))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return the deepest answer, or the mean of all."""
        answers = self.answers(x)
        return sum(answers[1:], answers[0]) / len(answers) if self.ensemble else answers[-1]


class ResNetWithExits(WithExits, ResNet):
    """A residual network with exits behind blocks."""

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        x = self.stem(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
                yield x

    def own_head(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(x))


class ViTWithExits(WithExits, ViT):
    """A vision transformer with exits behind blocks."""

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            yield x

    def own_head(self, x: Tensor) -> Tensor:
        return self.head(self.class_token(x))


def answers_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return a model's answers, one an exit; an ordinary model has one."""
    return model.answers(images) if isinstance(model, WithExits) else [model(images)]


def count_blocks(model: nn.Module) -> int:
    """Return how many blocks a network has."""
    return len(_blocks(model))


def _blocks(model: nn.Module) -> list[tuple[nn.Sequential, int, str]]:
    """Return every block as (where it is, its number there, the stream it writes)."""
    if isinstance(model, ResNet):
        stages = enumerate(model.stages, 1)
        return [(stage, number, f"layer{s}") for s, stage in stages for number in range(len(stage))]
    if isinstance(model, ViT):
        return [(model.blocks, number, "token") for number in range(len(model.blocks))]
    raise MotleyError(f"split.name = 'grid': {type(model).__name__} has no exits. Allowed are ResNets and ViTs.")


def add_exits(network: nn.Module, cuts: Sequence[int], level: int, head: str, ensemble: bool) -> WithExits:
    """Return a network with exits that ends at exit number `level`, made of an ordinary one, which is used up.

    Blocks behind that exit, and the ordinary head if it is not the last exit, are left out.
    """
    blocks, spec = _blocks(network), spec_of(network)
    ordinary_head = network.get_submodule(spec.head) if spec.head else None
    if not isinstance(ordinary_head, nn.Linear):
        raise MotleyError("model.projection: is for a network with one head; split.name = 'grid' has several.")
    heads = []
    for cut in cuts[: level + 1]:
        if cut < len(blocks):
            width = _width(network, *blocks[cut - 1][:2])
            heads.append(_head(head, width, ordinary_head.out_features, isinstance(network, ViT)))
    for where, number, _ in reversed(blocks[cuts[level] :]):
        del where[number]
    is_whole = cuts[level] == len(blocks)
    if not is_whole:
        for name in ("fc",) if isinstance(network, ResNet) else ("norm", "head"):
            delattr(network, name)
    model = ResNetWithExits(network) if isinstance(network, ResNet) else ViTWithExits(network)
    model.cuts, model.exits, model.ensemble = tuple(cuts[: level + 1]), nn.ModuleList(heads), ensemble
    classifiers = [f"exits.{number}.classify" for number in range(len(heads))]
    if is_whole and spec.head:
        classifiers.append(spec.head)
    # A network with exits branches, so it is no chain of stages.
    branched = replace(
        spec,
        stages=None,
        blocks=spec.blocks[: cuts[level]],
        head=spec.head if is_whole else None,
        classifiers=tuple(classifiers),
    )
    declare(model, branched)
    return model


def _width(model: nn.Module, where: nn.Sequential, number: int) -> int:
    if isinstance(model, ViT):
        return int(model.cls_token.shape[-1])
    last = [module for name, module in where[number].named_children() if name.startswith("conv")][-1]
    assert isinstance(last, nn.Conv2d)
    return last.out_channels


def _head(kind: str, width: int, classes: int, tokens: bool) -> nn.Module:
    return (
        ConvolutionHead(width, classes) if kind == "convolution" and not tokens else LinearHead(width, classes, tokens)
    )


def exit_channels(model: nn.Module) -> Channels:
    """Return the channels of a network's exits: each reads its block's stream and keeps one of its own inside."""
    assert isinstance(model, WithExits)
    blocks = _blocks(model)
    found: dict[str, tuple[Axis | None, ...]] = {}
    for number, (cut, head) in enumerate(zip(model.cuts, model.exits, strict=False)):
        assert isinstance(head.classify, nn.Linear)
        name, read = f"exits.{number}", Axis(blocks[cut - 1][2], head.classify.in_features)
        for layer in range(3) if isinstance(head, ConvolutionHead) else ():
            written = Axis(f"{name}.{layer}", read.width)
            found |= {f"{name}.convs.{layer}": (written, read), f"{name}.norms.{layer}": (written,)}
            read = written
        found |= {f"{name}.norm": (read,), f"{name}.classify": (Axis(CLASSES, head.classify.out_features), read)}
    return found
