"""Server optimisers: the mean change of a round as a gradient, for any method.

    FedAvgM     m <- beta1 m + D,  step lr m (with Nesterov: lr (D + beta1 m))
    the others  m <- beta1 m + (1 - beta1) D,  step lr m / (sqrt(v) + tau), where
    FedAdagrad  v <- v + D^2
    FedAdam     v <- beta2 v + (1 - beta2) D^2
    FedYogi     v <- v - (1 - beta2) D^2 sign(v - D^2)

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM); Reddi et al., Adaptive
Federated Optimization, ICLR 2021 (the others; no bias correction). D is what the method and InCo made of the round.
Moments advance only where somebody held the coordinate: a layer without an owner does not drift on old momentum.
Parameters only; buffers keep their plain mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from motley.core.merge import Aggregate
from motley.core.part import State
from motley.settings import Settings

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "none": {},
    "momentum": {},
    "adam": {"lr": 0.01},
    "yogi": {"lr": 0.01},
    "adagrad": {"lr": 0.1, "beta1": 0.0, "tau": 0.01},
}
"""What each optimiser changes in the fields' defaults: for the adaptive ones, the paper's choice for CIFAR-10."""


class ServerOptimizerSettings(Settings):
    """The server's optimiser, which takes the averaged delta as its gradient. Defaults depend on the optimiser."""

    name: Literal["none", "momentum", "adam", "yogi", "adagrad"] = "none"
    """The server's optimiser. momentum is FedAvgM; adam, yogi and adagrad are FedAdam, FedYogi and FedAdagrad."""
    lr: float = Field(default=1.0, gt=0)
    """Learning rate of the server's optimiser. Its default depends on the optimiser, as those of beta1 and tau do."""
    beta1: Decay = 0.9
    """Decay of the first moment."""
    beta2: Decay = 0.99
    """Decay of the second moment (adam, yogi)."""
    tau: float = Field(default=1e-3, gt=0)
    """Added to the square root of the second moment (adam, yogi, adagrad)."""
    initial: Literal["tau-squared", "zero"] = "tau-squared"
    """Initial value of the second moment: tau squared, as in the paper, or zero, as in many implementations."""
    nesterov: bool = False
    """Nesterov momentum (momentum only), as in Hsu et al."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_name(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        return {**OPTIMIZERS[name], **values} if isinstance(name, str) and name in OPTIMIZERS else values

    @model_validator(mode="after")
    def _nesterov_is_for_momentum(self) -> ServerOptimizerSettings:
        if self.nesterov and self.name != "momentum":
            raise ValueError(f"nesterov = true is for optimizer.name = 'momentum', not {self.name!r}")
        return self


def optimize(
    moments: State, merged: Aggregate, parameters: Collection[str], settings: ServerOptimizerSettings
) -> tuple[State, Aggregate]:
    """Return the moments after a round, and the optimiser's step in the place of the mean change."""
    if settings.name == "none":
        return moments, merged
    names = [name for name in merged.delta if name in parameters]
    gradients = [merged.delta[name] for name in names]
    rule = _momentum if settings.name == "momentum" else _adaptive
    before = {kind: _moments(moments, kind, names, gradients, settings) for kind in _kinds(settings)}
    steps, after = rule(gradients, before, settings)
    kept = dict(moments)
    for kind, tensors in after.items():
        for name, new, old in zip(names, tensors, before[kind], strict=True):
            held = merged.covered[name]
            kept[f"{kind}/{name}"] = new if held is None else torch.where(held, new, old)
    return kept, merged.with_delta({**merged.delta, **dict(zip(names, steps, strict=True))})


def _kinds(settings: ServerOptimizerSettings) -> tuple[str, ...]:
    return ("first",) if settings.name == "momentum" else ("first", "second")


def _moments(
    moments: State, kind: str, names: list[str], like: list[Tensor], settings: ServerOptimizerSettings
) -> list[Tensor]:
    """Return the moments of names; those that nobody held so far are new."""
    start = settings.tau**2 if kind == "second" and settings.initial == "tau-squared" else 0.0
    found = [moments.get(f"{kind}/{name}") for name in names]
    return [torch.full_like(t, start) if m is None else m for m, t in zip(found, like, strict=True)]


def _momentum(
    gradients: list[Tensor], moments: dict[str, list[Tensor]], settings: ServerOptimizerSettings
) -> tuple[Tensors, dict[str, Tensors]]:
    first = torch._foreach_add(torch._foreach_mul(moments["first"], settings.beta1), gradients)
    ahead = torch._foreach_add(gradients, first, alpha=settings.beta1) if settings.nesterov else first
    return torch._foreach_mul(ahead, settings.lr), {"first": first}


def _adaptive(
    gradients: list[Tensor], moments: dict[str, list[Tensor]], settings: ServerOptimizerSettings
) -> tuple[Tensors, dict[str, Tensors]]:
    first = torch._foreach_mul(moments["first"], settings.beta1)
    torch._foreach_add_(first, gradients, alpha=1 - settings.beta1)
    second = _second(moments["second"], torch._foreach_mul(gradients, gradients), settings)
    scales = torch._foreach_sqrt(second)
    torch._foreach_add_(scales, settings.tau)
    steps = torch._foreach_div(first, scales)
    torch._foreach_mul_(steps, settings.lr)
    return steps, {"first": first, "second": second}


def _second(second: list[Tensor], squares: Tensors, settings: ServerOptimizerSettings) -> Tensors:
    """Return the second moment after a round."""
    if settings.name == "adagrad":
        return torch._foreach_add(second, squares)
    if settings.name == "yogi":
        signs = torch._foreach_sign(torch._foreach_sub(second, squares))
        return torch._foreach_sub(second, torch._foreach_mul(signs, squares), alpha=1 - settings.beta2)
    return torch._foreach_add(torch._foreach_mul(second, settings.beta2), squares, alpha=1 - settings.beta2)
