"""Motley's kernels put into a model from outside.

A small network's step on a GPU is bound by the number of its kernels and by how well they share the
GPU with other clients' kernels, not by arithmetic. Models are plain modules that know nothing of
this. The engine replaces modules of its own copy of a model, one for one: a layer by a layer with a
kernel, and a residual block by a block that runs its norm, addition and ReLU as one kernel. A
replacement has the same children and parameters under the same names, so a model's state does not
change.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from motley.kernels import ALL, AVAILABLE
from motley.models import preact, resnet
from motley.models.spec import declare, spec_of
from motley.splits.base import OWN_MODELS

if AVAILABLE:
    from motley.kernels.layers import (
        FusedBatchNorm,
        FusedBatchNormReLU,
        FusedConv2d,
        FusedMaxPool2d,
        FusedStem,
        Pair,
    )


def apply_kernels(model: nn.Module, kernels: Collection[str] = ALL) -> nn.Module:
    """Return a model with the kernels of the given names in it, if there is Triton.

    The given model must not be used afterwards.
    """
    if not AVAILABLE:
        return model
    if not type(model).__module__.startswith(OWN_MODELS):
        # A user's model may change the output of a layer in place, as torchvision's do with
        # nn.ReLU(inplace=True). These kernels keep their output for the backward pass.
        kernels = frozenset(kernels) - {"norm", "pool"}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _layer(child, kernels)
            if replacement is not None:
                setattr(parent, name, replacement)
    if isinstance(model, resnet.ResNet):
        _fuse_stem(model, kernels)
        _fuse_resnet(model)
        # A subclass, such as a network with exits, has a forward pass of its own.
        if type(model) is resnet.ResNet and all(
            isinstance(stage, FusedStage) for stage in model.stages
        ):
            return FusedResNet(model)
    elif isinstance(model, preact.PreActResNet):
        _fuse_stem(model, kernels)
        _fuse_preact(model)
    return model


def _layer(layer: nn.Module, kernels: Collection[str]) -> nn.Module | None:
    """Return the replacement of a layer, or None if the layer stays.

    Only torch's own classes are replaced, because a subclass may compute something else. A layer
    with a hook, such as HeteroFL's scaler, stays, because its replacement would not have the hook.
    """
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    if (
        type(layer) is nn.BatchNorm2d
        and "norm" in kernels
        and layer.affine
        and layer.running_mean is not None
    ):
        return FusedBatchNorm.of(layer)
    if (
        type(layer) is nn.Conv2d
        and "conv" in kernels
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    ):
        return FusedConv2d.of(layer)
    if type(layer) is nn.MaxPool2d and "pool" in kernels:
        return FusedMaxPool2d.of(layer)
    return None


def _fuse_stem(model: resnet.ResNet | preact.PreActResNet, kernels: Collection[str]) -> None:
    plain = type(model.conv1) in (nn.Conv2d, FusedConv2d) and not model.conv1._forward_hooks
    if plain and "stem" in kernels:
        model.conv1 = FusedStem.of(model.conv1)


def _fuse_resnet(model: resnet.ResNet) -> None:
    if type(model.bn1) is FusedBatchNorm:
        model.bn1 = FusedBatchNormReLU.of(model.bn1)
        model.relu = nn.Identity()
    for name in resnet.LAYERS:
        stage = getattr(model, name)
        if all(_can_fuse(block) for block in stage):
            setattr(model, name, FusedStage(*(FusedBlock(block) for block in stage)))


def _fuse_preact(model: preact.PreActResNet) -> None:
    if type(model.norm) is FusedBatchNorm:
        model.norm = FusedBatchNormReLU.of(model.norm)
        model.relu = nn.Identity()
    for number, block in enumerate(model.blocks):
        if type(block.bn1) is type(block.bn2) is FusedBatchNorm:
            model.blocks[number] = FusedPreActBlock(block)


def _can_fuse(block: nn.Module) -> bool:
    """Tell whether all norms of a residual block have kernels. Group norms have none."""
    norms = [child for name, child in block.named_children() if name.startswith("bn")]
    return isinstance(block, resnet.Block) and all(type(norm) is FusedBatchNorm for norm in norms)


class FusedBlock(nn.Module):
    """A ResNet's block, basic or bottleneck: norm, addition and ReLU are one kernel each time."""

    downsample: nn.Module | None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        assert isinstance(block, resnet.Block)
        self.convolutions, self.downsample = block.convolutions, None
        for name, child in block.named_children():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice((x, x))[0]

    def twice(self, inputs: Pair) -> Pair:
        """Return the result for two uses: the next block's first convolution and its shortcut."""
        x, again = inputs
        shortcut = again if self.downsample is None else self.downsample(again)
        for number in range(1, self.convolutions):
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x), relu=True)
        last = self.convolutions
        x = getattr(self, f"conv{last}")(x)
        pair: Pair = getattr(self, f"bn{last}")(x, add=shortcut, relu=True, twice=True)
        return pair


class FusedStage(nn.Sequential):
    """Fused blocks behind each other: the gradients of a block's two uses are added in the kernel
    before it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.twice((x, x))[0]

    def twice(self, inputs: Pair) -> Pair:
        """Return the result for two uses, from inputs for two uses."""
        for block in self:
            assert isinstance(block, FusedBlock)
            inputs = block.twice(inputs)
        return inputs


class FusedResNet(resnet.ResNet):
    """A ResNet of fused stages, which hands results for two uses on from stage to stage."""

    def __init__(self, model: resnet.ResNet) -> None:
        nn.Module.__init__(self)
        for name, child in model.named_children():
            self.add_module(name, child)
        self.train(model.training)
        declare(self, spec_of(model))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        if isinstance(self.maxpool, FusedMaxPool2d):
            pair = self.maxpool(x, twice=True)
        else:
            x = self.maxpool(x)
            pair = (x, x)
        for stage in self.stages:
            assert isinstance(stage, FusedStage)
            pair = stage.twice(pair)
        return self.fc(self.pool(pair[0]))


class FusedPreActBlock(nn.Module):
    """A block of HeteroFL's ResNets: norm and ReLU are one kernel."""

    bn1: nn.Module
    conv1: nn.Module
    bn2: nn.Module
    conv2: nn.Module
    shortcut: nn.Module | None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.shortcut = None
        for name, child in block.named_children():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        active = self.bn1(x, relu=True)
        shortcut = x if self.shortcut is None else self.shortcut(active)
        y: Tensor = self.conv2(self.bn2(self.conv1(active), relu=True)) + shortcut
        return y
