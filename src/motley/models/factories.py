"""Users' own models in a configuration: the meaning of their names, and their options.

A name in `model.sizes` or `[model.factories]` may be the dotted path of a `ModelSpec`, or of a
function or class that builds a module (`motley.models.user`). `[model.options]` are its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from motley.core.dotted import describe, parameter_names, takes_any_keyword
from motley.core.errors import MotleyError, unknown
from motley.models.spec import MODELS, ModelSpec
from motley.models.user import ARGUMENTS, spec_of_factory
from motley.settings import validate


@dataclass(frozen=True)
class FactorySpec(ModelSpec):
    """The declaration of a plain factory whose options are not known yet."""

    #: Builds the module.
    factory: Callable[..., Any] = nn.Module


def accept_model(item: Any) -> ModelSpec:
    """Return the declaration of a user's own model."""
    if isinstance(item, ModelSpec):
        return item
    if isinstance(item, nn.Module):
        raise MotleyError(
            f"is {describe(item)}, one module; every client needs one of its own. Name the class, "
            "or a function that builds it."
        )
    if not callable(item):
        raise MotleyError(
            f"is {describe(item)}; a function that returns a torch.nn.Module, a class of modules "
            "or a motley.ModelSpec is expected."
        )
    return FactorySpec(build=item, factory=item)


def option_names(spec: ModelSpec) -> tuple[str, ...] | None:
    """Return the options that a user's model takes; None if it takes any."""
    if spec.options_class is not None:
        return tuple(spec.options_class.model_fields)
    if not isinstance(spec, FactorySpec) or takes_any_keyword(spec.factory):
        return None
    return tuple(name for name in parameter_names(spec.factory) if name not in ARGUMENTS)


def with_options(spec: ModelSpec, options: Mapping[str, Any]) -> tuple[ModelSpec, Any]:
    """Return a user's declaration, and the settings that its `build` takes.

    The options that the model does not name are left out: another size may take them.
    """
    names = option_names(spec)
    chosen = dict(options)
    if names is not None:
        chosen = {key: value for key, value in options.items() if key in names}
    if spec.options_class is not None:
        return spec, validate(spec.options_class, chosen, "model.options")
    if isinstance(spec, FactorySpec):
        factory = partial(spec.factory, **chosen) if chosen else spec.factory
        return spec_of_factory(factory, spec.family), None
    return spec, chosen


def check_options(options: Mapping[str, Any], specs: Mapping[str, ModelSpec]) -> None:
    """Reject options that none of the users' models takes."""
    allowed: dict[str, None] = {}  # used as an ordered set
    for spec in specs.values():
        names = option_names(spec)
        if names is None:
            return
        allowed |= dict.fromkeys(names)
    for key, value in options.items():
        if key not in allowed:
            raise MotleyError(f"model.options.{key} = {value!r}: {unknown('option', key, allowed)}")


MODELS.accept_with(accept_model)
