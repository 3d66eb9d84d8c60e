"""A classification head with a projection before its last layer."""

from __future__ import annotations

from torch import Tensor, nn


class ProjectionHead(nn.Module):
    """Linear, ReLU, linear (the projection), and the classifier on the projected features."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, width))
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.project(x))
