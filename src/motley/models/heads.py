"""The last layer of a model with a projection before it."""

from __future__ import annotations

from torch import Tensor, nn


class ProjectionHead(nn.Module):
    """Two linear maps with a ReLU between them, and the last layer on what they return."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, width))
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.project(x))
