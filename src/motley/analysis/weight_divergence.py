"""How far clients' models are from their mean after training: the weight divergence of FedImpro's Figures 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Models = Sequence[Mapping[str, Tensor]]
"""Parameters of clients' models under their global names; a model need not have all of them."""


def weight_divergence(models: Models) -> float:
    """Return the mean over clients of |theta_i - mean theta|, every name's mean being over the models that have it."""
    squares = _squared_distances(models)
    return sum(sum(by_name.values()) ** 0.5 for by_name in squares) / len(models)


def layer_divergence(models: Models) -> dict[str, float]:
    """Return the same for each layer, over the clients that have it: weight and bias of a module are one layer."""
    distances: dict[str, list[float]] = {}
    for by_name in _squared_distances(models):
        layers: dict[str, float] = {}
        for name, square in by_name.items():
            layer = name.rpartition(".")[0] or name
            layers[layer] = layers.get(layer, 0.0) + square
        for layer, square in layers.items():
            distances.setdefault(layer, []).append(square**0.5)
    return {layer: sum(found) / len(found) for layer, found in distances.items()}


def _squared_distances(models: Models) -> list[dict[str, float]]:
    names = dict.fromkeys(name for model in models for name in model)
    means = {n: torch.stack([m[n].detach().double() for m in models if n in m]).mean(0) for n in names}
    return [{n: float((t.detach().double() - means[n]).square().sum()) for n, t in model.items()} for model in models]
