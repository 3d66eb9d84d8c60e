"""What the stages of a model make of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from motley.models.resnet import ResNet


def stages(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's stages in order: stages of a ResNet, blocks of a ViT, layers of a perceptron; else children."""
    if isinstance(model, ResNet):
        return {f"stage {number}": stage for number, stage in enumerate(model.stages, start=1)}
    for kind in ("blocks", "layers"):
        if isinstance(found := getattr(model, kind, None), nn.Sequential | nn.ModuleList):
            return {f"{kind[:-1]} {number}": stage for number, stage in enumerate(found, start=1)}
    return {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return what every stage makes of images: one row an image."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given, answer: found.update({name: answer.flatten(1)})

    hooks = [stage.register_forward_hook(keep(name)) for name, stage in stages(model).items()]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def extractor(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the shallow part whose output FedIN shares: a ResNet's stem, or else the first stage."""
    if isinstance(model, ResNet):
        return model.stem
    first = next(iter(stages(model).values()))

    def shallow(images: Tensor) -> Tensor:
        answers: list[Tensor] = []
        hook = first.register_forward_hook(lambda module, given, answer: answers.append(answer))
        try:
            model(images)
        finally:
            hook.remove()
        return answers[0]

    return shallow
