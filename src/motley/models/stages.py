"""A model as a chain of named stages, each fed by the one before it: where a method may cut a model.

A model's stages are declared beside it (`spec.py`); methods take slices of the chain. FedIN's extractor, intermediate
layers and classifier are `chain[:1]`, `chain[1:-1]` and `chain[-1:]`; FedImpro's low and high level are the stages up
to a name and those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.models.spec import Stage, spec_of


class BoundStage(NamedTuple):
    """One link of a model's chain."""

    name: str
    run: Callable[[Tensor], Tensor]
    members: tuple[str, ...]


Chain = tuple[BoundStage, ...]


def chain_of(model: nn.Module) -> Chain:
    """Return a model's stages. Modules are looked up anew every time, because a head may have been replaced."""
    declared = spec_of(model).stages
    if declared is None:
        raise MotleyError(
            f"model.sizes: {type(model).__name__} declares no chain of stages (motley.models.spec), at which "
            "method.name would cut it. Choose another model or split, or a method that cuts none."
        )
    return tuple(_bound(model, stage) for stage in declared)


def _bound(model: nn.Module, stage: Stage) -> BoundStage:
    if not isinstance(stage.run, str):
        return BoundStage(stage.name, partial(stage.run, model), stage.members or ())
    path = stage.run or stage.name
    parent, _, name = path.rpartition(".")
    members = (path,) if stage.members is None else stage.members
    return BoundStage(stage.name, getattr(model.get_submodule(parent), name), members)


def run(stages: Sequence[BoundStage], x: Tensor) -> Tensor:
    """Return what leaves the last of the stages when `x` enters the first."""
    for stage in stages:
        x = stage.run(x)
    return x


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model's head is fed: one vector per image."""
    return run(chain_of(model)[:-1], x)


def owned(model: nn.Module, stages: Sequence[BoundStage]) -> list[str]:
    """Return the names of a model's parameters that belong to some of its stages, in the model's order."""
    members = {member for stage in stages for member in stage.members}
    names = []
    for name, _ in model.named_parameters():
        if any(is_within(name, member) for member in members):
            names.append(name)
    return names


def is_within(name: str, member: str) -> bool:
    """Tell whether a tensor or module is a member itself, or a part of it."""
    return name == member or name.startswith(f"{member}.")


def shape_behind(stages: Sequence[BoundStage], image: tuple[int, ...]) -> torch.Size:
    """Return the shape of what leaves a blueprint's stages, of one image: computed without memory."""
    with torch.no_grad():
        return run(stages, torch.empty((2, *image), device="meta")).shape[1:]
