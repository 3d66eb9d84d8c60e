"""A projection before the last layer, for methods that compare representations (MOON; SimCLR before it).

It takes the place of a model's last layer, so features, names and layers before it are as they were.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.heads import ProjectionHead
from motley.models.spec import declare, spec_of
from motley.models.stages import chain_of, run


def with_projection(model: nn.Module, width: int) -> nn.Module:
    """Put a projection of a width before the last layer of a model, in place; 0: leave the model as it is."""
    if not width:
        return model
    spec = spec_of(model)
    last = model.get_submodule(spec.head) if spec.head else None
    if spec.head is None or not isinstance(last, nn.Linear):
        raise MotleyError(
            f"model.projection = {width}: {type(model).__name__} declares no linear layer as its head "
            "(motley.models.spec), before which a projection could stand. Use 0."
        )
    parent, _, name = spec.head.rpartition(".")
    setattr(model.get_submodule(parent), name, ProjectionHead(last.in_features, width, last.out_features))
    return declare(model, replace(spec, classifiers=(f"{spec.head}.classify",)))


def representation_and_answer(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return what enters a model's last layer, one vector per image, and what leaves it."""
    *body, last = chain_of(model)
    features, head = run(body, images), last.run
    if not isinstance(head, ProjectionHead):
        return features, head(features)
    projected = head.project(features)
    return projected, head.classify(projected)
