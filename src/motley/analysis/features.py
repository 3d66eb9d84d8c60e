"""The outputs of a model's stages for given images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from motley.models.resnet import ResNet


def stages(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's stages in order.

    These are the stages of a ResNet, the blocks of a ViT, the layers of an MLP, and for other
    models the children that have parameters.
    """
    if isinstance(model, ResNet):
        return {f"stage {number}": stage for number, stage in enumerate(model.stages, start=1)}
    for attribute, title in (("blocks", "block"), ("layers", "layer")):
        modules = getattr(model, attribute, None)
        if isinstance(modules, nn.Sequential | nn.ModuleList):
            return {f"{title} {number}": module for number, module in enumerate(modules, start=1)}
    children = {}
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            children[name] = child
    return children


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the output of every stage, with one row per image."""
    outputs: dict[str, Tensor] = {}

    def store_as(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output.flatten(1)

        return hook

    handles = []
    for name, stage in stages(model).items():
        handles.append(stage.register_forward_hook(store_as(name)))
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def extractor(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the features FedIN shares.

    They are the output of a ResNet's stem, or of the first stage of other models.
    """
    if isinstance(model, ResNet):
        return model.stem
    first = next(iter(stages(model).values()))

    def shallow(images: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        handle = first.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            model(images)
        finally:
            handle.remove()
        return outputs[0]

    return shallow
