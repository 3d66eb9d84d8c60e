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
            for name, tensor in list(tensors.items()):
                shape = shapes.get(f"{prefix}.{name}" if prefix else name)
                if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
                    cut = tensor.detach()[tuple(slice(length) for length in shape)].clone()
                    # By assignment, because torch's recurrent layers keep a list of their weights.
                    setattr(module, name, nn.Parameter(cut) if name in module._parameters else cut)
        _resize(module)


def _resize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        module.out_channels, module.in_channels = module.weight.shape[:2]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.RNNBase):
        _resize_recurrent(module)
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        module.num_features = len(module.weight)
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight)
        if module.num_channels % module.num_groups:
            raise MotleyError(
                f"split.rates: {module.num_channels} channels do not divide into the "
                f"{module.num_groups} groups of a group norm (groups = {module.num_groups} in the "
                "model's table). Choose rates whose channels do, or norm = 'batch'."
            )


def _resize_recurrent(module: nn.RNNBase) -> None:
    """Update the sizes of a recurrent layer of torch (LSTM, GRU or RNN)."""
    if module.num_layers > 1 or module.bidirectional or module.proj_size:
        raise MotleyError(
            f"split.name: a {type(module).__name__} with several layers, two directions or a "
            "projection cannot be made narrower. Use one module per layer."
        )
    module.input_size = module.get_parameter("weight_ih_l0").shape[1]
    module.hidden_size = module.get_parameter("weight_hh_l0").shape[1]
