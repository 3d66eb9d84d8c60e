"""FedNova: clients that took more steps do not count more.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020. A client's delta is divided by a_i, which is how far its steps would carry it along a
constant gradient of one, in learning rates; the mean is multiplied by tau_eff, the mean of a_i:

    delta <- tau_eff * mean of (delta_i / a_i),    tau_eff = mean of a_i

Both means are over the owners of a coordinate, so a layer that only deep models have gets the
tau_eff of deep models. Equal a_i give FedAvg, bit for bit.

a_i is the number of steps for plain SGD, more with momentum and less with a proximal term (`mu`, as
in FedProx). For Adam a_i is not defined; the number of steps is used. With a proximal term tau_eff
is the mean number of steps, as in the authors' code. Buffers get the plain mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from motley.core.async_copy import tensor_on
from motley.core.merge import Aggregate, merge
from motley.core.part import State, select
from motley.core.tensors import divided
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, Requirements, ServerAlgorithm
from motley.methods.fedprox import FedProxClient, FedProxSettings
from motley.methods.step import Step


class FedNovaSettings(FedProxSettings):
    """FedNova's own settings."""

    name: str = "fednova"
    mu: float = Field(default=0.0, ge=0)
    """Weight of a proximal term; 0: none."""
    scale_buffers: bool = False
    """Rescale running statistics like parameters, as NIID-Bench does. If clients differ in their
    number of steps, a running variance can then fall below that of every client, in the worst case
    to zero.
    """


class FedNovaClient(FedProxClient):
    """FedProx with mu = 0 by default, and a report of a_i."""

    settings: FedNovaSettings

    def finish(self, step: Step) -> tuple[State, State]:
        payload, client_state = super().finish(step)
        training = self.info.training
        a = float(step.num_steps)
        momentum = training.optimizer.sgd_momentum
        if momentum is not None:  # with other optimizers, every step counts alike
            pull = self.settings.mu * training.lr(step.round_number)
            a = progress(step.num_steps, momentum, pull)
        return {**payload, "progress": torch.full((), a, device=step.round.device)}, client_state


class FedNovaServer(ServerAlgorithm):
    """FedAvg of deltas per unit of local progress."""

    settings: FedNovaSettings

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        a = torch.stack([update.payload["progress"].double().reshape(()) for update in updates])
        largest = a.max()
        names = {name for name in state if self._is_normalized(name, state)}
        # delta_i / a_i. Relative to the largest a_i, so that equal a_i are exactly one.
        rates = [
            _divided(update, ratio, names)
            for update, ratio in zip(updates, a / largest, strict=True)
        ]
        mean = merge(state, rates)
        counted = a
        if self.settings.mu:
            counted = tensor_on([update.num_steps for update in updates], a.dtype, a.device)
        tau = effective(state, updates, counted / largest, names)
        delta = {}
        for name, rate in mean.delta.items():
            delta[name] = rate * tau[name] if name in tau else rate
        return mean.with_delta(delta)

    def _is_normalized(self, name: str, state: State) -> bool:
        if name in self.info.split.parameters:
            return True
        return self.settings.scale_buffers and state[name].is_floating_point()


@METHODS.register(
    "fednova", "FedAvg of changes per unit of local progress", paper="Wang et al., NeurIPS 2020"
)
class FedNova(Method):
    """FedProx's local training, and a normalized mean."""

    Settings = FedNovaSettings
    Client = FedNovaClient
    Server = FedNovaServer
    requirements = Requirements(
        payload=True, own_training=True, own_aggregation=True, private_parts=True
    )


def progress(steps: int, momentum: float, pull: float) -> float:
    """Return a_i: the distance, in learning rates, that SGD covers along a gradient of one.

    `pull` is lr mu of a proximal term in that gradient. Without momentum and pull it is `steps`.
    """
    distance = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance


def _divided(update: ClientUpdate, a: Tensor, names: set[str]) -> ClientUpdate:
    """Return an update whose delta is divided by `a`, for the given global names."""
    normalized = {n: update.delta[n] for n, piece in update.part.items() if piece.name in names}
    return replace(update, delta={**update.delta, **divided(normalized, a.float())})


def effective(state: State, updates: Sequence[ClientUpdate], a: Tensor, names: set[str]) -> State:
    """Return tau_eff, the mean of `a` over owners, by name.

    It is one number per name, or one per coordinate if some client holds only a piece of the
    tensor. All of it is computed on the device: a host that read `a` would wait for the round's
    training.
    """
    in_pieces: set[str] = set()
    held: list[set[str]] = []  # per update
    for update in updates:
        pieces = update.part.values()
        in_pieces |= {piece.name for piece in pieces if piece.index is not None}
        held.append({piece.name for piece in pieces})
    in_pieces &= names
    per_coordinate = []
    for update, value in zip(updates, a.float(), strict=True):
        part = {local: piece for local, piece in update.part.items() if piece.name in in_pieces}
        values = {}
        for local, piece in part.items():
            values[local] = value.expand(select(state[piece.name], piece.index).shape)
        per_coordinate.append(replace(update, part=part, delta=values))
    whole = sorted(set().union(*held) & names - in_pieces)
    flat_weights: list[float] = []  # of a matrix with one row per name and one column per update
    for name in whole:
        for update, held_names in zip(updates, held, strict=True):
            flat_weights.append(update.weight if name in held_names else 0.0)
    weights = tensor_on(flat_weights, a.dtype, a.device).reshape(len(whole), len(updates))
    means = ((weights * a).sum(1) / weights.sum(1)).float()
    return {**dict(zip(whole, means, strict=True)), **merge(state, per_coordinate).delta}
