"""Parameters that are several tensors in one, each of which InCo mixes on its own."""

from __future__ import annotations

from torch import nn

from motley.models.lstm import GATES, LSTMLayer


def chunks_of(model: nn.Module, name: str) -> int:
    """Return how many tensors a parameter consists of, stacked along its first dimension.

    These are the gates of a recurrent layer, and query, key and value of an attention. Most
    parameters are a single tensor.
    """
    path, _, parameter = name.rpartition(".")
    layer = model.get_submodule(path)
    if isinstance(layer, nn.LSTM | LSTMLayer):
        # weight_hr projects the output (proj_size), and has no gates.
        return 1 if parameter.startswith("weight_hr") else GATES
    if isinstance(layer, nn.GRU):
        return 3
    if isinstance(layer, nn.MultiheadAttention):
        return 3 if parameter.startswith("in_proj") else 1
    if isinstance(layer, nn.Linear) and path.rpartition(".")[2] == "qkv":
        # The attentions of Motley and of timm compute all three by one linear layer of this name.
        return 3 if layer.out_features % 3 == 0 else 1
    return 1
