"""Optimizers that are not Motley's own: any class of torch optimizers, by its dotted path.

    [training.optimizer]
    name = "torch.optim:RMSprop"
    lr = 0.01
    alpha = 0.9

The keys of the table are the constructor's arguments whose defaults are numbers, lists of numbers
or texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from pydantic import Field, create_model, model_validator
from torch import Tensor

from motley.client.optimizers import Optimizer
from motley.client.training import (
    OPTIMIZER_CLASSES,
    OptimizerSettings,
    reset,
)
from motley.client.weights import LossScale, Weights
from motley.core.dotted import describe, required_parameters, takes_any_keyword
from motley.core.errors import MotleyError

#: Arguments that a user cannot set, because they choose how torch computes a step.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "maximize")
#: Classes with the argument `capturable` whose state starts with zeros: a captured CUDA graph can
#: contain their step, and zeroing the state in place starts it anew.
CAPTURABLE = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)


class OwnOptimizerSettings(OptimizerSettings):
    """A torch optimizer. `optimizer_class` is the class that the dotted path names."""

    optimizer_class: ClassVar[type[torch.optim.Optimizer]]
    has_kernel: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    @model_validator(mode="after")
    def _takes_weight_decay(self) -> OwnOptimizerSettings:
        if self.weight_decay and "weight_decay" not in _arguments(self.optimizer_class):
            raise ValueError(f"{self.name} takes no weight_decay")
        return self

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can contain its step."""
        return self.optimizer_class in CAPTURABLE

    @property
    def moments(self) -> int:
        """Two, as for Adam: an estimate, because the number is unknown before the first step."""
        return 2

    def build(
        self,
        parameters: Iterable[Tensor],
        device: torch.device,
        fused: bool = False,
        weights: Weights | None = None,
        scale: LossScale | None = None,
    ) -> Optimizer:
        """Return the optimizer."""
        names = _arguments(self.optimizer_class)
        arguments: dict[str, Any] = self.model_dump(exclude={"name"})
        if "weight_decay" not in names:
            del arguments["weight_decay"]
        if device.type == "cuda" and self.captures:
            arguments |= {"lr": torch.tensor(self.lr, device=device), "capturable": True}
        return self.optimizer_class(list(parameters), **arguments)

    def reset(self, optimizer: Optimizer, lr: float) -> None:
        """Let an optimizer start anew.

        Its state may start with other values than zeros, and hold other things than tensors. So it
        is dropped, unless a captured step writes into it.
        """
        if isinstance(optimizer.param_groups[0]["lr"], float):
            optimizer.state.clear()
        reset(optimizer, lr)


def accept_optimizer(item: Any) -> type[OptimizerSettings]:
    """Return the settings class of an optimizer that a dotted path names."""
    if isinstance(item, type) and issubclass(item, OptimizerSettings):
        return item
    if not isinstance(item, type) or not issubclass(item, torch.optim.Optimizer):
        raise MotleyError(f"is {describe(item)}; a subclass of torch.optim.Optimizer is expected.")
    arguments = _arguments(item)
    if "lr" not in arguments and not takes_any_keyword(item):
        raise MotleyError("takes no argument `lr`; the clients' learning rate has to go there.")
    needed = [name for name in required_parameters(item.step) if name != "self"]
    if needed:
        raise MotleyError(
            f"its step needs {', '.join(needed)}; clients call step() after backward()."
        )
    fields: dict[str, Any] = {}
    for name, parameter in arguments.items():
        default = parameter.default
        if name in IMPLEMENTATION or default is Parameter.empty:
            continue
        if name == "lr":
            if isinstance(default, int | float):
                fields["lr"] = (float, Field(default=float(default), gt=0))
        elif isinstance(default, bool | str):
            fields[name] = (type(default), default)
        elif isinstance(default, int | float):
            fields[name] = (int | float, default)
        elif isinstance(default, tuple) and all(isinstance(x, int | float) for x in default):
            fields[name] = (tuple[float, ...], default)
    settings = create_model(
        item.__name__, __base__=OwnOptimizerSettings, __doc__=item.__name__, **fields
    )
    settings.optimizer_class = item
    return settings


def _arguments(optimizer_class: type[torch.optim.Optimizer]) -> dict[str, Parameter]:
    """Return the arguments of an optimizer after the parameters that it optimizes."""
    parameters = list(signature(optimizer_class).parameters.values())[1:]
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword}


OPTIMIZER_CLASSES.accept_with(accept_optimizer)
