"""Facts about a model: as its `ModelSpec` declares them, and otherwise inferred.

Splits and methods ask here. A fact that is neither declared nor can be inferred raises
`InferenceError`, a `MotleyError` that says why and what to declare.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from motley.models.channels import Axis, Channels
from motley.models.inference import InferenceError, inference_of
from motley.models.inference.record import Attribute
from motley.models.inference.streams import Length
from motley.models.spec import CrossLayer, ModelSpec, Stage, spec_of

__all__ = [
    "InferenceError",
    "blocks_of",
    "channels_of",
    "classifiers_of",
    "cross_layers_of",
    "has_stages",
    "head_of",
    "stages_of",
    "width_attributes_of",
]


def stages_of(model: nn.Module) -> tuple[Stage, ...]:
    """Return where methods may cut a model; the last stage is the head."""
    spec = spec_of(model)
    if spec.stages is None and spec.built_with is None:
        raise InferenceError(
            f"{type(model).__name__} declares no chain of stages (motley.models.spec)."
        )
    return spec.stages if spec.stages is not None else inference_of(model).stages


def has_stages(model: nn.Module) -> bool:
    """Tell whether a model is a chain of stages."""
    try:
        stages_of(model)
    except InferenceError:
        return False
    return True


def head_of(model: nn.Module) -> str:
    """Return the path of a model's last layer."""
    spec = spec_of(model)
    if spec.head is None and spec.built_with is None:
        raise InferenceError(f"{type(model).__name__} declares no head (motley.models.spec).")
    return spec.head if spec.head is not None else inference_of(model).head


def classifiers_of(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the layers that output one value per class; none if they are unknown."""
    spec = spec_of(model)
    if spec.classifiers:
        return spec.classifiers
    try:
        return (head_of(model),)
    except InferenceError:
        return ()


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return a model's repeated blocks in order, by their paths. There may be none."""
    spec = spec_of(model)
    if spec.blocks is not None:
        return spec.blocks
    return inference_of(model).blocks if spec.built_with is not None else ()


def cross_layers_of(model: nn.Module) -> Sequence[CrossLayer]:
    """Return the pairs of parameters that InCo mixes. There may be none."""
    spec = spec_of(model)
    if spec.cross_layers is not None:
        return spec.cross_layers(model)
    return inference_of(model).cross_layers if spec.built_with is not None else ()


def channels_of(model: nn.Module) -> Channels:
    """Return which channels of a model belong together."""
    spec = spec_of(model)
    if spec.channels is not None:
        return spec.channels(model)
    if spec.built_with is None:
        raise InferenceError(f"{type(model).__name__} declares no channels (motley.models.spec).")
    return inference_of(model).channels


def width_attributes_of(model: nn.Module) -> list[tuple[Attribute, Length]]:
    """Return the attributes of modules that hold the length of a dimension that can be cut."""
    spec: ModelSpec = spec_of(model)
    if spec.channels is not None or spec.built_with is None:
        return []
    return inference_of(model).streams.attributes


def streams_in(channels: Channels) -> dict[str, Axis]:
    """Return the streams of channels, by name."""
    streams: dict[str, Axis] = {}
    for tensor_axes in channels.values():
        for axis in tensor_axes:
            if axis is not None:
                streams.setdefault(axis.stream, axis)
    return streams
