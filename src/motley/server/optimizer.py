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

from motley.core.dotted import subclass_of
from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.registry import Registry
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState
from motley.settings import RegistryChoice, Settings

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


class ServerOptimizerSettings(Settings):
    """The server's optimizer, which takes the averaged delta as its gradient. Without one, the
    delta is the step.

    To write your own, derive a class from this one, give it its settings as fields, and implement
    `step`. `server.optimizer.name` is then its dotted path.
    """

    lasting = ()

    name: str = "none"
    """The server's optimizer. momentum is FedAvgM; adam, yogi and adagrad are FedAdam, FedYogi and
    FedAdagrad. Also the dotted path of your own.
    """

    def initial_moments(self) -> dict[str, float]:
        """Return the kinds of tensors that are kept per parameter, with their initial values."""
        return {}

    def step(
        self, gradients: list[Tensor], moments: dict[str, Tensors]
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the step of every parameter, and the moments after it.

        `gradients` are the averaged deltas, so a step goes in their direction. `moments` has one
        list of tensors per kind. Nothing is changed in place, and no value is read from a device.
        """
        raise NotImplementedError


class MomentumSettings(ServerOptimizerSettings):
    """FedAvgM."""

    name: Literal["momentum"] = "momentum"
    lr: float = Field(default=1.0, gt=0)
    """Learning rate of the server's optimizer."""
    beta1: Decay = 0.9
    """Momentum."""
    nesterov: bool = False
    """Nesterov momentum, as in Hsu et al."""

    def initial_moments(self) -> dict[str, float]:
        """The momentum starts at zero."""
        return {"first": 0.0}

    def step(
        self, gradients: list[Tensor], moments: dict[str, Tensors]
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the step, and the momentum after it."""
        first = torch._foreach_add(torch._foreach_mul(moments["first"], self.beta1), gradients)
        ahead = torch._foreach_add(gradients, first, alpha=self.beta1) if self.nesterov else first
        return torch._foreach_mul(ahead, self.lr), {"first": first}


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

    def initial_moments(self) -> dict[str, float]:
        """The second moment may start above zero."""
        return {"first": 0.0, "second": self.tau**2 if self.initial == "tau-squared" else 0.0}

    def step(
        self, gradients: list[Tensor], moments: dict[str, Tensors]
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Return the step, and both moments after it."""
        first = torch._foreach_mul(moments["first"], self.beta1)
        torch._foreach_add_(first, gradients, alpha=1 - self.beta1)
        second = self.second_moment(moments["second"], torch._foreach_mul(gradients, gradients))
        scales = torch._foreach_sqrt(second)
        torch._foreach_add_(scales, self.tau)
        steps = torch._foreach_div(first, scales)
        torch._foreach_mul_(steps, self.lr)
        return steps, {"first": first, "second": second}

    def second_moment(self, second: Tensors, squares: Tensors) -> Tensors:
        """Return the second moment after a round, given the squared gradients."""
        raise NotImplementedError


class AdagradSettings(AdaptiveSettings):
    """FedAdagrad."""

    name: Literal["adagrad"] = "adagrad"
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of the server's optimizer."""
    beta1: Decay = 0.0
    """Decay of the first moment."""
    tau: float = Field(default=0.01, gt=0)
    """Added to the square root of the second moment."""

    def second_moment(self, second: Tensors, squares: Tensors) -> Tensors:
        """Return the sum of all squared gradients so far."""
        return torch._foreach_add(second, squares)


class AdamSettings(AdaptiveSettings):
    """FedAdam, and FedYogi, which has the same settings."""

    name: Literal["adam", "yogi"] = "adam"
    beta2: Decay = 0.99
    """Decay of the second moment."""

    def second_moment(self, second: Tensors, squares: Tensors) -> Tensors:
        """Return Adam's moving average of squared gradients, or Yogi's."""
        if self.name == "yogi":
            signs = torch._foreach_sign(torch._foreach_sub(second, squares))
            return torch._foreach_sub(
                second, torch._foreach_mul(signs, squares), alpha=1 - self.beta2
            )
        return torch._foreach_add(
            torch._foreach_mul(second, self.beta2), squares, alpha=1 - self.beta2
        )


SERVER_OPTIMIZER_CLASSES: Registry[type[ServerOptimizerSettings]] = Registry(
    "server optimizer",
    group="motley.server_optimizers",
    accept=subclass_of(ServerOptimizerSettings, "motley.ServerOptimizerSettings"),
)
_register = SERVER_OPTIMIZER_CLASSES.register
_register("none", "the averaged delta is the step")(ServerOptimizerSettings)
_register("momentum", "FedAvgM", paper="Hsu et al., 2019")(MomentumSettings)
_register("adam", "FedAdam", paper="Reddi et al., ICLR 2021")(AdamSettings)
_register("yogi", "FedYogi", paper="Reddi et al., ICLR 2021")(AdamSettings)
_register("adagrad", "FedAdagrad", paper="Reddi et al., ICLR 2021")(AdagradSettings)
#: Chosen by server.optimizer.name.
SERVER_OPTIMIZERS = RegistryChoice(
    "none", SERVER_OPTIMIZER_CLASSES, lambda settings: settings, listed=True
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
    before: dict[str, Tensors] = {}
    for order, initial in settings.initial_moments().items():
        before[order] = _moments(moments, order, names, gradients, initial)
    steps, after = settings.step(gradients, before)
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
    moments: State, order: str, names: list[str], like: list[Tensor], initial: float
) -> list[Tensor]:
    """Return the moments of names. Names that nobody has held so far get initial ones."""
    tensors = []
    for name, tensor in zip(names, like, strict=True):
        moment = moments.get(f"{order}/{name}")
        tensors.append(torch.full_like(tensor, initial) if moment is None else moment)
    return tensors
