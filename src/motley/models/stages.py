"""A model as a chain of named stages, each applied to the output of the one before it.

Methods may cut a model between stages, and take slices of the chain: FedIN's extractor,
intermediate layers and classifier are `chain[:1]`, `chain[1:-1]` and `chain[-1:]`, and FedImpro's
low-level and high-level parts are the stages up to a given one and those after it. The stages are
declared in the model's `ModelSpec` (`spec.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.facts import InferenceError, stages_of
from motley.models.inputs import InputShape, example_inputs
from motley.models.spec import Stage


class BoundStage(NamedTuple):
    """One stage of a given model."""

    name: str
    run: Callable[[Tensor], Tensor]
    members: tuple[str, ...]


Chain = tuple[BoundStage, ...]
#: What torch raises if a tensor on the meta device is asked for its values: NotImplementedError and
#: other RuntimeErrors, and TypeError for numpy's arrays and for formatted numbers.
NO_VALUES = (RuntimeError, TypeError)


def chain_of(model: nn.Module) -> Chain:
    """Return a model's stages.

    Modules are looked up again on every call, because a head may have been replaced.
    """
    try:
        stages = stages_of(model)
    except InferenceError as error:
        raise MotleyError(
            f"model.sizes: {error} A method that cuts models (method.name) needs a chain of "
            "stages. Choose another model or split, or a method that does not cut models."
        ) from error
    return tuple(bind(model, stage) for stage in stages)


def bind(model: nn.Module, stage: Stage) -> BoundStage:
    """Return a stage of a given model."""
    if not isinstance(stage.run, str):
        return BoundStage(stage.name, partial(stage.run, model), stage.members or ())
    path = stage.run or stage.name
    parent, _, name = path.rpartition(".")
    members = (path,) if stage.members is None else stage.members
    return BoundStage(stage.name, getattr(model.get_submodule(parent), name), members)


def run(stages: Sequence[BoundStage], x: Tensor) -> Tensor:
    """Apply stages one after the other."""
    for stage in stages:
        x = stage.run(x)
    return x


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Return the input of a model's head: one vector per example."""
    return run(chain_of(model)[:-1], x)


def owned(model: nn.Module, stages: Sequence[BoundStage]) -> list[str]:
    """Return the names of the parameters that belong to given stages, in the model's order."""
    members: set[str] = set()
    for stage in stages:
        members.update(stage.members)
    names = []
    for name, _ in model.named_parameters():
        if any(is_within(name, member) for member in members):
            names.append(name)
    return names


def is_within(name: str, member: str) -> bool:
    """Tell whether the tensor or module `name` is `member` itself or inside it."""
    return name == member or name.startswith(f"{member}.")


def shape_behind(model: nn.Module, end: int, shape: InputShape) -> torch.Size:
    """Return the shape of one input's features behind the stages `chain_of(model)[:end]`.

    The model is on the meta device.
    """
    return shape_of(model, lambda model, inputs: run(chain_of(model)[:end], inputs), shape)


def shape_of(
    model: nn.Module, compute: Callable[[nn.Module, Tensor], Tensor], shape: InputShape
) -> torch.Size:
    """Return the shape of what is computed of one input. The model is on the meta device."""
    with torch.no_grad():
        try:
            outputs = compute(model, example_inputs(shape, 2, "meta"))
        except NO_VALUES:
            # Some models look at values, as BatchNorm without a momentum does when it trains.
            # Errors in shapes have these types, too: on the CPU they are raised again.
            outputs = compute(_with_zeros(model), example_inputs(shape, 2, "cpu"))
    return outputs.shape[1:]


def _with_zeros(model: nn.Module) -> nn.Module:
    """Return a copy of a model without values that has some, all of them zero."""
    copy = deepcopy(model).to_empty(device="cpu").eval()
    for tensor in (*copy.parameters(), *copy.buffers()):
        tensor.zero_()
    return copy
