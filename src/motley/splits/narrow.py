"""A model with fewer channels: the same layers, each tensor cut to its shape in a part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from motley.core.errors import MotleyError


def narrow(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cut every tensor of a model to its leading rows and columns, in place.

    The layers' attributes, such as `in_channels`, are updated too.
    """
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
                    cut = tensor.detach()[tuple(slice(length) for length in shape)].clone()
                    tensors[name] = nn.Parameter(cut) if isinstance(tensor, nn.Parameter) else cut
        _resize(module)


def _resize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        module.out_channels, module.in_channels = module.weight.shape[:2]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.BatchNorm2d):
        module.num_features = len(module.weight)
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight)
        if module.num_channels % module.num_groups:
            raise MotleyError(
                f"split.rates: {module.num_channels} channels do not divide into "
                f"model.resnet.groups = {module.num_groups}. Choose rates whose channels do, or "
                "model.resnet.norm = 'batch'."
            )
