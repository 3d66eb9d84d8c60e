"""The outputs of a model's stages for given images, and a model cut into two behind a stage.

The stages are those that the model declares (`models/spec.py`). A model that branches, such as one
with early exits, declares no chain of stages but its blocks; features are then the blocks' outputs.
For a model that declares nothing they are the outputs of its children that have parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError, unknown
from motley.models.facts import blocks_of, has_stages
from motley.models.stages import chain_of, run

#: Name of the point before the first stage: the images themselves.
INPUT = "input"
#: Name of the input of the head, FedIN's s_out (Eq. 5).
S_OUT = "s_out"


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the output of every stage before the head, with one row per image.

    Stages without parameters, such as a pooling, are left out.
    """
    if not has_stages(model):
        outputs = _hooked(model, images, _modules(model))
        return {name: output.flatten(1) for name, output in outputs.items()}
    outputs = {}
    x = images
    for stage in chain_of(model)[:-1]:
        x = stage.run(x)
        if stage.members:
            outputs[stage.name] = x.flatten(1)
    return outputs


@torch.no_grad()
def features_at(model: nn.Module, images: Tensor, stage: str, key: str) -> Tensor:
    """Return the output of one stage, or s_out, with one row per image.

    `key` is the setting that `stage` comes from, for the error about an unknown stage.
    """
    if stage != S_OUT:
        outputs = features(model, images)
        if stage in outputs:
            return outputs[stage]
        if not has_stages(model):
            raise MotleyError(f"{key} = {stage!r}: {unknown('stage', stage, [S_OUT, *outputs])}")
        return cut(model, stage, key).low(images).flatten(1)
    if not has_stages(model):
        return list(features(model, images).values())[-1]
    return run(chain_of(model)[:-1], images).flatten(1)


class CutModel(NamedTuple):
    """A model as two functions: `high(low(images))` are its logits."""

    low: Callable[[Tensor], Tensor]
    high: Callable[[Tensor], Tensor]


def cut(model: nn.Module, stage: str, key: str, size: str = "") -> CutModel:
    """Cut a model behind a stage, or, at "input" or "s_out", before the first or the last stage.

    `key` is the setting that `stage` comes from, and `size` the model's name, for the error about
    an unknown stage.
    """
    if stage == INPUT:
        # Models that are not a chain of stages can be cut here, too.
        return CutModel(lambda images: images, model)
    if not has_stages(model):
        raise MotleyError(
            f"{key} = {stage!r}: model {size or type(model).__name__!r} declares no stages "
            f"(motley.models.spec), so it cannot be cut. Allowed: {INPUT}."
        )
    chain = chain_of(model)
    names = [stage.name for stage in chain[:-1]]
    if stage == S_OUT:
        count = len(names)
    elif stage in names:
        count = names.index(stage) + 1
    else:
        of_size = f" model {size!r}:" if size else ""
        message = unknown("stage", stage, [INPUT, S_OUT, *names])
        raise MotleyError(f"{key} = {stage!r}:{of_size} {message}")
    return CutModel(partial(run, chain[:count]), partial(run, chain[count:]))


def extractor(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the features FedIN shares: the first stage's output."""
    if has_stages(model):
        return chain_of(model)[0].run
    name, first = next(iter(_modules(model).items()))

    def shallow(images: Tensor) -> Tensor:
        return _hooked(model, images, {name: first})[name]

    return shallow


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that stand for the stages of a model that declares no chain of stages."""
    blocks = blocks_of(model)
    if blocks:
        return {path: model.get_submodule(path) for path in blocks}
    children = {}
    for name, child in model.named_children():
        if next(child.parameters(), None) is not None:
            children[name] = child
    return children


def _hooked(
    model: nn.Module, images: Tensor, modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Run a model, and return the outputs of some of its modules."""
    outputs: dict[str, Tensor] = {}

    def store_as(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output

        return hook

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_hook(store_as(name)))
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return outputs
