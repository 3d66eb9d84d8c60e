"""FedNova: clients that took more steps do not pull harder.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020. A
client's change is divided by a_i, how far its steps would carry it along a constant gradient, in learning rates; the
mean is multiplied by tau_eff, the mean of a_i. Both means are over the owners of a coordinate: a layer that only deep
models have gets the tau_eff of deep models. Equal a_i give FedAvg, bit for bit.

a_i is the number of steps for plain SGD, more with momentum and less with a proximal term (`mu`, as in FedProx). For
Adam a_i is not defined: there the number of steps is used. With a proximal term tau_eff is the mean number of steps, as
in the authors' code. Buffers get the plain mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from motley.aggregate.merge import Merged, Update, merge
from motley.methods.base import METHODS
from motley.methods.fedprox import FedProx, FedProxSettings
from motley.splits.part import State, select

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class FedNovaSettings(FedProxSettings):
    """FedNova's own settings."""

    name: str = "fednova"
    mu: float = Field(default=0.0, ge=0)
    """Strength of a proximal term; 0: none."""
    scale_buffers: bool = False
    """Rescale running statistics like parameters, as NIID-Bench does. Where clients have unlike numbers of steps the
    rescaled mean goes too far: a running variance can fall below that of every client, to zero at worst.
    """


@METHODS.register("fednova", "FedAvg of changes per unit of local progress", paper="Wang et al., NeurIPS 2020")
class FedNova(FedProx):
    """FedProx with mu = 0 by default, and a normalised mean."""

    Settings = FedNovaSettings
    settings: FedNovaSettings

    def reply(self, learner: Learner) -> State:
        assert learner.job is not None
        training, made = learner.training, float(learner.taken)
        if training.optimizer.name == "sgd":
            pull = self.settings.mu * training.lr(learner.job.round_number)
            made = progress(learner.taken, training.optimizer.momentum, pull)
        return {"progress": torch.full((), made, device=learner.device)}

    def aggregate(self, server: State, state: State, updates: Sequence[Update]) -> Merged:
        made = [float(update.message["progress"]) for update in updates]
        most = max(made)
        normalised = {name for name in state if self._normalised(name, state)}
        rates = [self._divided(update, a / most, normalised) for update, a in zip(updates, made, strict=True)]
        merged = merge(state, rates)
        counted = [update.steps for update in updates] if self.settings.mu else made
        tau = effective(state, updates, [a / most for a in counted], normalised)
        return merged.with_change({n: c * tau[n] if n in tau else c for n, c in merged.change.items()})

    def _normalised(self, name: str, state: State) -> bool:
        return name in self.world.split.parameters or (self.settings.scale_buffers and state[name].is_floating_point())

    def _divided(self, update: Update, a: float, names: set[str]) -> Update:
        own = [local for local, piece in update.part.items() if piece.name in names]
        rates = torch._foreach_div([update.change[local] for local in own], a)
        return replace(update, change={**update.change, **dict(zip(own, rates, strict=True))})


def progress(steps: int, momentum: float, pull: float) -> float:
    """Return a_i: the distance, in learning rates, that SGD covers along a gradient of one.

    `pull` is lr mu of a proximal term in that gradient. Without both it is `steps`.
    """
    distance = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance


def effective(state: State, updates: Sequence[Update], made: Sequence[float], names: set[str]) -> State:
    """Return the mean of `made` over owners: a number a name, or one a coordinate of names that come in pieces."""
    pieced = {piece.name for update in updates for piece in update.part.values() if piece.index is not None}
    number = torch.zeros((), dtype=torch.float64)
    room = {name: state[name] if name in pieced else number for name in names}
    counts = []
    for update, value in zip(updates, made, strict=True):
        part = {local: piece for local, piece in update.part.items() if piece.name in names}
        given = {n: torch.full_like(select(room[piece.name], piece.index), value) for n, piece in part.items()}
        counts.append(replace(update, part=part, change=given))
    return merge(room, counts).change
