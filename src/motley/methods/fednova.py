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
from torch import Tensor

from motley.core.async_copy import tensor_on
from motley.core.merge import Aggregate, merge
from motley.core.part import State, select
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS
from motley.methods.fedprox import FedProx, FedProxSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class FedNovaSettings(FedProxSettings):
    """FedNova's own settings."""

    name: str = "fednova"
    mu: float = Field(default=0.0, ge=0)
    """Weight of a proximal term; 0: none."""
    scale_buffers: bool = False
    """Rescale running statistics like parameters, as NIID-Bench does. If clients differ in their number of steps, a
    running variance can then fall below that of every client, in the worst case to zero.
    """


@METHODS.register("fednova", "FedAvg of changes per unit of local progress", paper="Wang et al., NeurIPS 2020")
class FedNova(FedProx):
    """FedProx with mu = 0 by default, and a normalised mean."""

    Settings = FedNovaSettings
    settings: FedNovaSettings

    def payload(self, learner: Learner) -> State:
        assert learner.job is not None
        training, made = learner.training, float(learner.taken)
        momentum = training.optimizer.sgd_momentum
        if momentum is not None:  # with other optimisers, every step counts alike
            pull = self.settings.mu * training.lr(learner.job.round_number)
            made = progress(learner.taken, momentum, pull)
        return {"progress": torch.full((), made, device=learner.device)}

    def aggregate(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        made = torch.stack([update.payload["progress"].double().reshape(()) for update in updates])
        most = made.max()
        normalised = {name for name in state if self._normalised(name, state)}
        merged = merge(state, [self._divided(u, a, normalised) for u, a in zip(updates, made / most, strict=True)])
        counted = tensor_on([u.num_steps for u in updates], made.dtype, made.device) if self.settings.mu else made
        tau = effective(state, updates, counted / most, normalised)
        return merged.with_delta({n: c * tau[n] if n in tau else c for n, c in merged.delta.items()})

    def _normalised(self, name: str, state: State) -> bool:
        return name in self.info.split.parameters or (self.settings.scale_buffers and state[name].is_floating_point())

    def _divided(self, update: ClientUpdate, a: Tensor, names: set[str]) -> ClientUpdate:
        own = [local for local, piece in update.part.items() if piece.name in names]
        rates = torch._foreach_div([update.delta[local] for local in own], a.float())
        return replace(update, delta={**update.delta, **dict(zip(own, rates, strict=True))})


def progress(steps: int, momentum: float, pull: float) -> float:
    """Return a_i: the distance, in learning rates, that SGD covers along a gradient of one.

    `pull` is lr mu of a proximal term in that gradient. Without both it is `steps`.
    """
    distance = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance


def effective(state: State, updates: Sequence[ClientUpdate], made: Tensor, names: set[str]) -> State:
    """Return the mean of `made` over owners: a number a name, or one a coordinate of names that come in pieces.

    All on the device: a host that read `made` would wait for the round's training.
    """
    pieced = {piece.name for update in updates for piece in update.part.values() if piece.index is not None} & names
    counts = []
    for update, value in zip(updates, made.float(), strict=True):
        part = {local: piece for local, piece in update.part.items() if piece.name in pieced}
        given = {n: value.expand(select(state[piece.name], piece.index).shape) for n, piece in part.items()}
        counts.append(replace(update, part=part, delta=given))
    held = [{piece.name for piece in update.part.values()} for update in updates]
    whole = sorted(set().union(*held) & names - pieced)
    weights = [u.weight * (name in own) for name in whole for u, own in zip(updates, held, strict=True)]
    owned = tensor_on(weights, made.dtype, made.device).reshape(len(whole), len(updates))
    means = ((owned * made).sum(1) / owned.sum(1)).float()
    return {**dict(zip(whole, means, strict=True)), **merge(state, counts).delta}
