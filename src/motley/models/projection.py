"""A projection before the last layer, for methods that compare representations (MOON, SimCLR).

It is part of the module that replaces a model's last layer, so the layers before it keep their
names and outputs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.facts import InferenceError, head_of
from motley.models.heads import ProjectionHead
from motley.models.inputs import InputShape
from motley.models.spec import declare, spec_of
from motley.models.stages import chain_of, run, shape_of


def with_projection(model: nn.Module, width: int) -> nn.Module:
    """Insert a projection to `width` features before a model's last layer, in place.

    With width 0 the model is returned unchanged.
    """
    if not width:
        return model
    try:
        path = head_of(model)
        last = model.get_submodule(path)
        reason = f"{path!r} is a {type(last).__name__}"
    except InferenceError as error:
        last, reason = None, str(error).rstrip(".")
    if not isinstance(last, nn.Linear):
        raise MotleyError(
            f"model.projection = {width}: a projection is inserted before a linear head, and "
            f"{type(model).__name__} has none: {reason}. Use 0."
        )
    parent, _, name = path.rpartition(".")
    head = ProjectionHead(last.in_features, width, last.out_features)
    setattr(model.get_submodule(parent), name, head)
    return declare(model, replace(spec_of(model), head=path, classifiers=(f"{path}.classify",)))


def representation_width(blueprint: nn.Module, shape: InputShape) -> int:
    """Return the width of the input of a model's last layer. The model is on the meta device."""
    return shape_of(
        blueprint,
        lambda model, inputs: representation_and_answer(model, inputs)[0].flatten(1),
        shape,
    ).numel()


def representation_and_answer(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of a model's last layer, one vector per example, and its logits."""
    *body, last = chain_of(model)
    features, head = run(body, inputs), last.run
    if not isinstance(head, ProjectionHead):
        return features, head(features)
    projected = head.project(features)
    return projected, head.classify(projected)
