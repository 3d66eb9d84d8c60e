"""Global states with properties that tests need."""

from __future__ import annotations

import torch

from motley.core.part import State


def with_large_means(state: State) -> State:
    """Give a convolution outputs with a mean of a thousand standard deviations and a running mean to match.

    The first channel of its input becomes the constant 10, which the middle tap of every filter multiplies by about
    100. In single precision the running mean takes that away again. In bf16 the tap is rounded by up to 0.25, so every
    output moves by up to 2.5, which is several standard deviations.
    """
    state = {name: tensor.clone() for name, tensor in state.items()}
    taps = state["layer1.0.conv1.weight"]
    large = torch.linspace(100.2, 101.2, len(taps), device=taps.device)
    state["bn1.weight"][0] = 0
    state["bn1.bias"][0] = 10
    taps[:, 0] = 0
    taps[:, 0, 1, 1] = large
    for name, tensor in state.items():
        if name.endswith("layer1.0.bn1.running_mean"):
            tensor.add_(10 * large)
    return state
