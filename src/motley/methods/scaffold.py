"""SCAFFOLD: control variates that take the drift out of local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
With c at the server and c_i at every client, a local step of learning rate lr is the optimizer's
own step and then

    y <- y - lr (c - c_i)

and after K steps (option II of the paper)

    c_i <- c_i - c + (w - y) / (K lr),    c <- c + (sum of the clients' changes of c_i) / N

where N counts all clients that hold a layer, whether they took part or not (or only those that did,
see `divide_by`). Correcting the weights after the step, not the gradient before it, is the same for
plain SGD; with Adam or momentum only this fits c_i, which is a displacement. Control variates are
for parameters. They follow the clients' own training, whatever InCo and the server optimizer do
with the mean delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from motley.core.merge import Aggregate, add_shares
from motley.core.part import Part, State, take
from motley.core.randomness import key
from motley.core.tensors import difference, divide_, scale_, subtract_, total
from motley.core.update import ClientUpdate
from motley.methods.base import (
    METHODS,
    ClientAlgorithm,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.step import Step
from motley.splits.base import Split


class ScaffoldSettings(MethodSettings):
    """SCAFFOLD's own settings."""

    name: str = "scaffold"
    initial: Literal["zeros", "weights"] = "zeros"
    """Initial value of all control variates. zeros: 0. weights: the random weights of another
    network, as in NIID-Bench. These cancel over all clients, but until every client has taken part
    they disturb the steps.
    """
    divide_by: Literal["all", "sampled"] = "all"
    """The clients that the sum of changes is divided by, in the rule for c. all: all that hold a
    layer, as in the paper, so that c is the mean of all c_i. sampled: those that took part, as in
    FedImpro's code; c then moves N / |S| times as far.
    """


class ScaffoldClient(ClientAlgorithm):
    """FedAvg, and a correction of every step by c - c_i."""

    settings: ScaffoldSettings

    def initial_client_state(self, size: str, received: State) -> State:
        control = initial_control(self.info.split, self.settings, self.info.seed)
        return control_of(control, self.info.split.part(size))

    def before_training(self, step: Step) -> None:
        # The same lr (c - c_i) is subtracted in every step of the round.
        drift = difference(step.broadcast, step.client_state)
        scale_(drift, step.lr)
        step.keep("drift", drift)

    def after_step(self, step: Step) -> None:
        # y <- y - lr (c - c_i)
        subtract_(step.params, step.scratch["drift"])
        step.sync()

    def finish(self, step: Step) -> tuple[State, State]:
        # c_i <- c_i - c + (w - y) / (K lr), computed as ((w - y) / K - lr (c - c_i)) / lr
        control = difference(self.shared(step.size, step.received), step.params)
        divide_(control, step.num_steps)
        subtract_(control, step.scratch["drift"])
        divide_(control, step.lr)
        change = difference(control, step.client_state)
        return change, control


class ScaffoldServer(ServerAlgorithm):
    """FedAvg, and the mean of all clients' control variates."""

    settings: ScaffoldSettings

    def init(self) -> State:
        return initial_control(self.info.split, self.settings, self.info.seed)

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        size = self.info.size_of(client, round_number)
        return control_of(own, self.info.split.part(size, round_number, client))

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        # c <- c + (sum of the clients' changes of c_i) / N
        divides_by_all = self.settings.divide_by == "all"
        if divides_by_all and self.info.robust_merge is None:
            return add_shares(own, updates, lambda update: update.payload, self.info.owners)
        change = self._merged_payload(own, updates)
        if divides_by_all:
            # The sum over the round's clients is their number times the (robust) mean.
            zeros = {name: torch.zeros_like(c) for name, c in own.items()}
            sampled_shares = add_shares(zeros, updates, _ones, self.info.owners)
            change = {name: sampled_shares[name] * tensor for name, tensor in change.items()}
        return {**own, **total(own, change)}

    def _merged_payload(self, own: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the mean of the changes over the clients that took part and hold a coordinate, or
        the result of the robust rule that `server.merge` names.
        """
        changes = []
        for update in updates:
            part = {name: update.part[name] for name in update.payload}
            changes.append(
                replace(update, delta=update.payload, part=part, weight=1.0, row_weights={})
            )
        merged = self.info.merge(own, changes)
        return {name: _covered(merged, name) for name in merged.delta}


@METHODS.register(
    "scaffold", "FedAvg with control variates against drift", paper="Karimireddy et al., ICML 2020"
)
class Scaffold(Method):
    """FedAvg with control variates; twice the communication."""

    Settings = ScaffoldSettings
    Client = ScaffoldClient
    Server = ScaffoldServer
    requirements = Requirements(
        client_state=True,
        payload=True,
        own_training=True,
        own_aggregation=True,
        private_parts=True,
        robust_merge=True,
    )


def initial_control(split: Split, settings: ScaffoldSettings, seed: int) -> State:
    """Return the control variates of all parameters before the first round, under global names."""
    if settings.initial == "zeros":
        return split.zeros()
    weights = split.initial(key(seed, "control variates"))
    return {name: tensor for name, tensor in weights.items() if name in split.parameters}


def _covered(merged: Aggregate, name: str) -> Tensor:
    """Return the change of one name, with 0 for coordinates without an owner."""
    mask = merged.covered[name]
    return merged.delta[name] if mask is None else torch.where(mask, merged.delta[name], 0)


def _ones(update: ClientUpdate) -> State:
    return {name: torch.ones_like(tensor) for name, tensor in update.payload.items()}


def control_of(control: State, part: Part) -> State:
    """Return the control variates of a client's part, under the client's own names."""
    return take(control, {name: piece for name, piece in part.items() if piece.name in control})
