"""The stage that applies a server optimizer, for which the aggregated delta is the gradient.

    FedAvgM     m <- beta1 m + D,  step lr m (with Nesterov: lr (D + beta1 m))
    the others  m <- beta1 m + (1 - beta1) D,  step lr m / (sqrt(v) + tau), where
    FedAdagrad  v <- v + D^2
    FedAdam     v <- beta2 v + (1 - beta2) D^2
    FedYogi     v <- v - (1 - beta2) D^2 sign(v - D^2)

Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM); Reddi
et al., Adaptive Federated Optimization, ICLR 2021 (the others; no bias correction). D is the delta
after the earlier stages.

Moments advance only for coordinates that somebody held: a layer without an owner does not drift on
old momentum. Only parameters are optimized; buffers keep their plain mean.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState
from motley.settings import Choice, Settings

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


class ServerOptimizerSettings(Settings):
    """The server's optimizer, which takes the averaged delta as its gradient. Without one, the
    delta is the step.
    """

    lasting = ()

    name: str = "none"
    """The server's optimizer. momentum is FedAvgM; adam, yogi and adagrad are FedAdam, FedYogi and
    FedAdagrad.
    """


class MomentumSettings(ServerOptimizerSettings):
    """FedAvgM."""

    name: Literal["momentum"] = "momentum"
    lr: float = Field(default=1.0, gt=0)
    """Learning rate of the server's optimizer."""
    beta1: Decay = 0.9
    """Momentum."""
    nesterov: bool = False
    """Nesterov momentum, as in Hsu et al."""


class AdaptiveSettings(ServerOptimizerSettings):
    """The adaptive optimizers. Defaults are the paper's choices for CIFAR-10."""

    lr: float = Field(default=0.01, gt=0)
    """Learning rate of the server's optimizer."""
    beta1: Decay = 0.9
    """Decay of the first moment."""
    tau: float = Field(default=1e-3, gt=0)
    """Added to the square root of the second moment."""
    initial: Literal["tau-squared", "zero"] = "tau-squared"
    """Initial value of the second moment: tau squared, as in the paper, or zero, as in many
    implementations.
    """


class AdagradSettings(AdaptiveSettings):
    """FedAdagrad."""

    name: Literal["adagrad"] = "adagrad"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of the server's optimizer."""
    beta1: Decay = 0.0
    """Decay of the first moment."""
    tau: float = Field(default=0.01, gt=0)
    """Added to the square root of the second moment."""


class AdamSettings(AdaptiveSettings):
    """FedAdam, and FedYogi, which has the same settings."""

    name: Literal["adam", "yogi"] = "adam"
    beta2: Decay = 0.99
    """Decay of the second moment."""


#: Chosen by server.optimizer.name.
SERVER_OPTIMIZERS = Choice(
    "none",
    {
        "none": ServerOptimizerSettings,
        "momentum": MomentumSettings,
        "adam": AdamSettings,
        "yogi": AdamSettings,
        "adagrad": AdagradSettings,
    },
)


@dataclass(frozen=True)
class ServerOptimizer:
    """Replace the aggregated delta by the optimizer's step. The stage's state holds the moments."""

    parameters: Collection[str]
    settings: ServerOptimizerSettings
    name: str = "optimizer"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return the step, and the moments after it."""
        moments = server.stage_states.get(self.name, {})
        moments, aggregate = optimize(moments, aggregate, self.parameters, self.settings)
        return StageResult(server.with_stage_state(self.name, moments), aggregate)


def optimize(
    moments: State,
    aggregate: Aggregate,
    parameters: Collection[str],
    settings: ServerOptimizerSettings,
) -> tuple[State, Aggregate]:
    """Return the moments after a round, and the optimizer's step in place of the delta.

    Moments are named first/NAME and second/NAME.
    """
    if settings.name == "none":
        return moments, aggregate
    names = [name for name in aggregate.delta if name in parameters]
    gradients = [aggregate.delta[name] for name in names]
    orders = ("first",) if settings.name == "momentum" else ("first", "second")
    before = {order: _moments(moments, order, names, gradients, settings) for order in orders}
    if isinstance(settings, MomentumSettings):
        steps, after = _momentum(gradients, before, settings)
    else:
        assert isinstance(settings, AdaptiveSettings)
        steps, after = _adaptive(gradients, before, settings)
    new_moments = dict(moments)
    for order, tensors in after.items():
        for name, new, old in zip(names, tensors, before[order], strict=True):
            covered = aggregate.covered[name]
            new_moments[f"{order}/{name}"] = (
                new if covered is None else torch.where(covered, new, old)
            )
    delta = {**aggregate.delta, **dict(zip(names, steps, strict=True))}
    return new_moments, aggregate.with_delta(delta)


def _moments(
    moments: State,
    order: str,
    names: list[str],
    like: list[Tensor],
    settings: ServerOptimizerSettings,
) -> list[Tensor]:
    """Return the moments of names. Names that nobody has held so far get initial ones."""
    initial = 0.0
    if order == "second" and isinstance(settings, AdaptiveSettings):
        initial = settings.tau**2 if settings.initial == "tau-squared" else 0.0
    tensors = []
    for name, tensor in zip(names, like, strict=True):
        moment = moments.get(f"{order}/{name}")
        tensors.append(torch.full_like(tensor, initial) if moment is None else moment)
    return tensors


def _momentum(
    gradients: list[Tensor], moments: dict[str, list[Tensor]], settings: MomentumSettings
) -> tuple[Tensors, dict[str, Tensors]]:
    first = torch._foreach_add(torch._foreach_mul(moments["first"], settings.beta1), gradients)
    ahead = (
        torch._foreach_add(gradients, first, alpha=settings.beta1) if settings.nesterov else first
    )
    return torch._foreach_mul(ahead, settings.lr), {"first": first}


def _adaptive(
    gradients: list[Tensor], moments: dict[str, list[Tensor]], settings: AdaptiveSettings
) -> tuple[Tensors, dict[str, Tensors]]:
    first = torch._foreach_mul(moments["first"], settings.beta1)
    torch._foreach_add_(first, gradients, alpha=1 - settings.beta1)
    second = _second(moments["second"], torch._foreach_mul(gradients, gradients), settings)
    scales = torch._foreach_sqrt(second)
    torch._foreach_add_(scales, settings.tau)
    steps = torch._foreach_div(first, scales)
    torch._foreach_mul_(steps, settings.lr)
    return steps, {"first": first, "second": second}


def _second(second: list[Tensor], squares: Tensors, settings: AdaptiveSettings) -> Tensors:
    """Return the second moment after a round."""
    if not isinstance(settings, AdamSettings):
        return torch._foreach_add(second, squares)
    if settings.name == "yogi":
        signs = torch._foreach_sign(torch._foreach_sub(second, squares))
        return torch._foreach_sub(
            second, torch._foreach_mul(signs, squares), alpha=1 - settings.beta2
        )
    return torch._foreach_add(
        torch._foreach_mul(second, settings.beta2), squares, alpha=1 - settings.beta2
    )
