"""Models that a user brings: a factory of an ordinary `nn.Module`, and no declaration.

A factory is called without arguments, or with `input_shape` and `num_classes` if it names them:

    def small(input_shape, num_classes):
        return torchvision.models.resnet18(num_classes=num_classes)

The facts that splits and methods need are inferred from the module (`motley.models.inference`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from motley.core.errors import MotleyError
from motley.models.inputs import InputShape, dims_of
from motley.models.spec import ModelSpec

#: The arguments that a factory may name.
ARGUMENTS = ("input_shape", "num_classes")


def spec_of_factory(factory: Any, family: str = "") -> ModelSpec:
    """Return the declaration of a user's model: how to build it, and nothing else.

    A `ModelSpec` is returned as it is, so that users may declare some facts themselves.
    """
    if isinstance(factory, ModelSpec):
        return factory
    name = factory_name(factory)
    if isinstance(factory, nn.Module):
        raise MotleyError(
            f"model {name!r} is a module, and every client needs one of its own. Pass a function "
            "that builds it, such as lambda: Net()."
        )
    if not callable(factory):
        raise MotleyError(
            f"model {name!r} is a {type(factory).__name__}. Allowed are a function that returns a "
            "torch.nn.Module, a class of modules, or a motley.models.ModelSpec."
        )
    _accepted_arguments(factory)
    return ModelSpec(partial(_build, factory), family)


def build_user_model(factory: Callable[..., Any], shape: InputShape, classes: int) -> Any:
    """Call a user's factory, with `input_shape` and `num_classes` if it names them.

    `input_shape` is a plain tuple of integers, without the batch dimension. The result is checked
    where it is used: a factory may return anything.
    """
    values = {"input_shape": dims_of(shape), "num_classes": classes}
    model = factory(**{name: values[name] for name in _accepted_arguments(factory)})
    if isinstance(model, nn.Module) and _is_from_transformers(model):
        model.register_forward_hook(_logits_only)
    return model


def factory_name(factory: Any) -> str:
    """Return a factory's name for messages."""
    if isinstance(factory, partial):
        return factory_name(factory.func)
    return str(getattr(factory, "__qualname__", type(factory).__name__))


def _build(factory: Callable[..., Any], settings: Any, shape: InputShape, classes: int) -> Any:
    """Build the model as a `ModelSpec` does it. There are no settings of the family."""
    return build_user_model(factory, shape, classes)


def _accepted_arguments(factory: Callable[..., Any]) -> list[str]:
    """Return which of `ARGUMENTS` a factory names. Raise if it needs other ones."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some callables of C code have no signature
        return []
    accepted = []
    for parameter in parameters:
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            accepted.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise MotleyError(
                f"model {factory_name(factory)!r} needs an argument {parameter.name!r}. A factory "
                f"is called without arguments, or with {' and '.join(ARGUMENTS)} if it names them. "
                f"Give {parameter.name!r} a default, or wrap the factory in a function. With a "
                "default, model.options sets it in a configuration."
            )
    return accepted


def _is_from_transformers(model: nn.Module) -> bool:
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def _logits_only(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the logits of a Hugging Face model, whose forward returns them with other outputs."""
    return getattr(output, "logits", output)
