"""What is declared about a model, beside it: a `ModelSpec` per size, and the registry of all sizes.

A model is any `nn.Module`. Only `build` is required. Everything else says what splits and methods may do with the
model. A split or a method that needs a missing declaration says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from motley.core.registry import Registry
from motley.models.channels import Channels


class ImageShape(NamedTuple):
    """What a model is fed: channels, height, width."""

    channels: int
    height: int
    width: int


class CrossLayer(NamedTuple):
    """A pair of parameters of one shape: the shallow one ("layer 0") helps the deep one (InCo, Section 3.2)."""

    source: str
    target: str


class Stage(NamedTuple):
    """One stage of a model: a model with stages computes them one after the other."""

    name: str
    #: The submodule or method of the model that computes it, by its path ("blocks.0"), or a function of model and
    #: inputs; the stage's name if it is empty.
    run: str | Callable[[Any, Tensor], Tensor] = ""
    #: The model's modules and parameters that belong to the stage; the module that computes it if it is None.
    members: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModelSpec:
    """One size: how to build it, and what else is known about it."""

    #: (the family's settings, image shape, classes) -> a new module, initialized from torch's global generator.
    build: Callable[..., nn.Module]
    #: Sizes of one family have the same settings table, and layers that share a name can be shared.
    family: str = ""
    #: Where methods may cut the model (FedIN, FedImpro, MOON); the last stage is the head.
    stages: tuple[Stage, ...] | None = None
    #: The repeated blocks in order, by their paths: where InclusiveFL keeps a size's last block apart.
    blocks: tuple[str, ...] = ()
    #: Which channels belong together, from the model; None: the model cannot be split in width.
    channels: Callable[[Any], Channels] | None = None
    #: The pairs of parameters that InCo mixes, from the model.
    cross_layers: Callable[[Any], Sequence[CrossLayer]] = lambda model: ()
    #: The last layer, by its path.
    head: str | None = None
    #: Layers that return one number per class; the head if nothing is given.
    classifiers: tuple[str, ...] = ()

    def make(self, *arguments: Any) -> nn.Module:
        """Build a model that `spec_of` knows the declaration of."""
        model = self.build(*arguments)
        # A user's function may return anything; what is no module is refused when it is used.
        return declare(model, self) if isinstance(model, nn.Module) else model

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        """Return itself, because it never changes: a copy of a model has the same declaration."""
        return self


#: A model's attribute that holds its declaration. Steps and methods are given a model, and nothing beside it.
_ATTRIBUTE = "motley_spec"


def declare(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Note a model's declaration, in place of an earlier one, and return the model."""
    setattr(model, _ATTRIBUTE, spec)
    return model


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the declaration of a model, which says nothing if nothing was declared."""
    spec = getattr(model, _ATTRIBUTE, None)
    return spec if isinstance(spec, ModelSpec) else ModelSpec(type(model))


def classifiers_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the layers that return one number per class."""
    if spec.classifiers:
        return spec.classifiers
    return () if spec.head is None else (spec.head,)


MODELS: Registry[ModelSpec] = Registry("model")
