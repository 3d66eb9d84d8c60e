"""Declarations about models: one `ModelSpec` per size, and the registry of all sizes.

A model is any `nn.Module`. Only `build` is required. The other fields say what splits and methods
may do with the model. A field that is None is inferred from the model when it is needed
(`motley.models.facts`, `motley.models.inference`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from motley.core.errors import MotleyError, unknown
from motley.core.registry import Registry
from motley.models.channels import Channels
from motley.models.initialization import Initialization, initialize
from motley.models.inputs import ImageShape as ImageShape
from motley.settings import Settings


class CrossLayer(NamedTuple):
    """A pair of parameters of equal shape (InCo, Section 3.2).

    The shallow one's gradient ("layer 0") is mixed into the deep one's.
    """

    source: str
    target: str
    #: Both tensors are this many tensors, stacked along the first dimension, and each of them is
    #: mixed on its own: the gates of an LSTM; query, key and value of an attention.
    chunks: int = 1


class Stage(NamedTuple):
    """One stage of a model: a model with stages computes them one after the other."""

    name: str
    #: The submodule or method that computes the stage, by its path in the model ("blocks.0"), or a
    #: function of model and inputs. If it is empty, the path is the stage's name.
    run: str | Callable[[Any, Tensor], Tensor] = ""
    #: The modules and parameters of the model that belong to the stage. If it is None, this is the
    #: module that computes the stage.
    members: tuple[str, ...] | None = None


class BuiltWith(NamedTuple):
    """The arguments of `ModelSpec.build`."""

    settings: Any
    shape: Any
    classes: int


@dataclass(frozen=True)
class ModelSpec:
    """One size: how to build it, and its parts that splits and methods use."""

    #: (the family's settings, input shape, classes) -> a new module, initialized with torch's
    #: global random generator. For a model that is not Motley's own, the first argument is an
    #: object of `options_class`, or the table `[model.options]` if there is no such class.
    build: Callable[..., nn.Module]
    #: Sizes of one family have the same settings table, and layers that share a name can be shared.
    family: str = ""
    #: Where methods may cut the model (FedIN, FedImpro, MOON); the last stage is the head.
    stages: tuple[Stage, ...] | None = None
    #: The repeated blocks in order, by their paths. InclusiveFL does not share a size's last block.
    blocks: tuple[str, ...] | None = None
    #: Model -> which of its channels belong together.
    channels: Callable[[Any], Channels] | None = None
    #: Model -> the pairs of parameters that InCo mixes.
    cross_layers: Callable[[Any], Sequence[CrossLayer]] | None = None
    #: The last layer, by its path.
    head: str | None = None
    #: Layers that output one value per class, by their paths. If it is empty, this is the head.
    classifiers: tuple[str, ...] = ()
    #: Called with the initialized model and the arguments of `build`, to change it in place.
    #: Changes of weights' shapes belong here, since initial values depend on shapes.
    after_init: Callable[..., None] | None = None
    #: The arguments of `build`, from which the missing fields are inferred. `make` sets it. Nothing
    #: is inferred if it is None.
    built_with: BuiltWith | None = None
    #: The settings class of `[model.options]`, for a model that is not Motley's own.
    options_class: type[Settings] | None = None

    def make(self, *arguments: Any, init: Initialization = "model") -> nn.Module:
        """Build and initialize a model, and attach this declaration to it, for `spec_of`."""
        model = self.build(*arguments)
        if not isinstance(model, nn.Module):
            # A user's function may return anything. It is rejected where the model is used.
            return model
        self._check_paths(model)
        initialize(model, init)
        if self.after_init is not None:
            self.after_init(model, *arguments)
        if self.is_complete or len(arguments) != len(BuiltWith._fields):
            return declare(model, self)
        return declare(model, replace(self, built_with=BuiltWith(*arguments)))

    def _check_paths(self, model: nn.Module) -> None:
        """Refuse declared paths that do not lead to a module."""
        if self.head is not None and not isinstance(self.head, str):
            raise MotleyError(f"ModelSpec.head = {self.head!r}: should be the path of a module.")
        heads = () if self.head is None else (self.head,)
        declared = {"blocks": self.blocks or (), "head": heads, "classifiers": self.classifiers}
        modules = dict(model.named_modules())
        for field, paths in declared.items():
            if isinstance(paths, str):
                raise MotleyError(f"ModelSpec.{field} = {paths!r}: should be a tuple of paths.")
            for path in paths:
                if path not in modules:
                    raise MotleyError(
                        f"ModelSpec.{field}: {unknown('module', path, filter(None, modules))}"
                    )

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to infer."""
        facts = (self.stages, self.blocks, self.channels, self.cross_layers, self.head)
        return all(fact is not None for fact in facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        """Return itself, because it never changes: a copy of a model has the same declaration."""
        return self


#: The attribute of a model that holds its declaration. It is stored on the model because steps and
#: methods receive nothing but the model.
_ATTRIBUTE = "motley_spec"


def declare(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Attach a declaration to a model, replacing any earlier one, and return the model."""
    setattr(model, _ATTRIBUTE, spec)
    return model


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the declaration of a model, or an empty one if nothing was declared."""
    spec = getattr(model, _ATTRIBUTE, None)
    return spec if isinstance(spec, ModelSpec) else ModelSpec(type(model))


__all__ = [
    "MODELS",
    "BuiltWith",
    "CrossLayer",
    "ImageShape",
    "ModelSpec",
    "Stage",
    "declare",
    "spec_of",
]

MODELS: Registry[ModelSpec] = Registry("model", group="motley.models")
