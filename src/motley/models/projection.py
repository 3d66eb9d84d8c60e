"""A projection before the last layer, for methods that compare representations (MOON; SimCLR before it).

It takes the place of a model's last layer, so features, names and layers before it are as they were.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ProjectionHead(nn.Module):
    """Two linear maps with a ReLU between them, and the last layer on what they return."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, width))
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.project(x))


def with_projection(model: nn.Module, width: int) -> nn.Module:
    """Put a projection of a width before the last layer of a model, in place; 0: leave the model as it is."""
    if width:
        *_, (name, last) = model.named_children()
        assert isinstance(last, nn.Linear)
        setattr(model, name, ProjectionHead(last.in_features, width, last.out_features))
    return model


def representation_and_answer(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what enters a model's last layer, one vector an image, and what leaves it."""
    features, head = model.features(images), model.head
    if not isinstance(head, ProjectionHead):
        return features, head(features)
    projected = head.project(features)
    return projected, head.classify(projected)
