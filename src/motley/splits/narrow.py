"""A model with fewer channels: the same layers, each tensor cut to its shape in a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from motley.core.errors import MotleyError


def narrow(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Cut every tensor of a model to its leading rows and columns, in place.

    The layers' attributes, such as `in_channels`, are updated too. A parameter that a model has
    under two names is still one parameter afterwards.
    """
    cut: dict[Tensor, Tensor] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
                    if tensor not in cut:
                        cut[tensor] = _leading(tensor, shape)
                    # By assignment: torch's recurrent layers keep a list of their weights.
                    setattr(module, name, cut[tensor])
        _resize(module)


def _leading(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    leading = tensor.detach()[tuple(slice(length) for length in shape)].clone()
    return nn.Parameter(leading) if isinstance(tensor, nn.Parameter) else leading


def _resize(module: Any) -> None:
    """Update the attributes of a layer that say how wide it is."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        module.in_channels = module.weight.shape[0]
        module.out_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, nn.modules.conv._ConvNd):
        _resize_convolution(module)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.RNNBase):
        _resize_recurrent(module)
    elif isinstance(module, nn.MultiheadAttention):
        module.embed_dim = module.out_proj.weight.shape[0]
        module.head_dim = module.embed_dim // module.num_heads
        if module._qkv_same_embed_dim:
            module.kdim = module.vdim = module.embed_dim
    elif isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None:
        module.num_features = len(module.weight)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm) and module.weight is not None:
        _resize_group_norm(module)


def _resize_convolution(module: nn.modules.conv._ConvNd) -> None:
    depthwise = module.groups == module.in_channels
    if depthwise and module.groups > 1:
        # The groups of a depthwise convolution are its channels.
        multiplier = module.out_channels // module.groups
        module.groups = module.weight.shape[0] // multiplier
    module.out_channels = module.weight.shape[0]
    module.in_channels = module.weight.shape[1] * module.groups


def _resize_group_norm(module: nn.GroupNorm) -> None:
    if module.num_groups == module.num_channels:  # one group per channel
        module.num_groups = len(module.weight)
    module.num_channels = len(module.weight)
    if module.num_channels % module.num_groups:
        raise MotleyError(
            f"split.rates: {module.num_channels} channels do not divide into the "
            f"{module.num_groups} groups of a group norm (groups = {module.num_groups} in the "
            "model's table). Choose rates whose channels do, or norm = 'batch'."
        )


def _resize_recurrent(module: nn.RNNBase) -> None:
    """Update the sizes of a recurrent layer of torch (LSTM, GRU or RNN)."""
    if module.proj_size:
        raise MotleyError(
            f"split.name: a {type(module).__name__} with a projection cannot be made narrower."
        )
    module.input_size = module.get_parameter("weight_ih_l0").shape[1]
    module.hidden_size = module.get_parameter("weight_hh_l0").shape[1]
