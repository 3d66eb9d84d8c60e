"""SCAFFOLD: control variates that take the drift out of local steps.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020. With c at the server
and c_i at every client, a local step of learning rate lr is the optimiser's own and then

    y <- y - lr (c - c_i)

and after K steps (option II of the paper)

    c_i <- c_i - c + (w - y) / (K lr),    c <- c + (sum of the clients' changes of c_i) / N

where N counts all clients that hold a layer, whether they took part or not. Correcting the weights after the step, not
the gradient before it, is the same for plain SGD; with Adam or momentum only this fits c_i, which is a displacement.
Control variates are for parameters; they follow what clients did, whatever InCo and the server make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from motley.core.merge import add_shares
from motley.core.part import State, take
from motley.core.randomness import key
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class ScaffoldSettings(MethodSettings):
    """SCAFFOLD's own setting."""

    name: str = "scaffold"
    initial: Literal["zeros", "weights"] = "zeros"
    """Initial value of all control variates. zeros: 0. weights: the random weights of another network, as in
    NIID-Bench. These cancel over all clients, but until every client has taken part they disturb the steps.
    """


@METHODS.register("scaffold", "FedAvg with control variates against drift", paper="Karimireddy et al., ICML 2020")
class Scaffold(Method):
    """FedAvg, and a correction of every step; twice the communication."""

    Settings = ScaffoldSettings
    settings: ScaffoldSettings

    def init(self) -> State:
        return self._initial

    @cached_property
    def _initial(self) -> State:
        split = self.info.split
        if self.settings.initial == "zeros":
            return split.zeros()
        drawn = split.initial(key(self.info.seed, "control variates"))
        return {name: tensor for name, tensor in drawn.items() if name in split.parameters}

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        part = self.info.split.part(self.info.size_of(client, round_number), round_number, client)
        return take(server, {name: piece for name, piece in part.items() if piece.name in server})

    def initial_client_state(self, size: str, received: State) -> State:
        part = self.info.split.part(size)
        return take(self._initial, {name: piece for name, piece in part.items() if piece.name in self._initial})

    def before_training(self, learner: Learner) -> None:
        """Put lr (c - c_i), which every step takes away, in the place of c."""
        drift = learner.in_order(learner.message)
        torch._foreach_sub_(drift, learner.in_order(learner.memory))
        torch._foreach_mul_(drift, learner.lr)

    def after_step(self, learner: Learner) -> None:
        torch._foreach_sub_(learner.trained, learner.in_order(learner.message))

    def _control(self, learner: Learner) -> tuple[Tensor, ...]:
        """Return the new c_i: ((w - y) / K - lr (c - c_i)) / lr."""
        control = torch._foreach_sub(learner.anchors, learner.trained)
        torch._foreach_div_(control, learner.taken)
        torch._foreach_sub_(control, learner.in_order(learner.message))
        torch._foreach_div_(control, learner.lr)
        return control

    def payload(self, learner: Learner) -> State:
        return learner.by_name(torch._foreach_sub(self._control(learner), learner.in_order(learner.memory)))

    def next_client_state(self, learner: Learner) -> State:
        return learner.by_name(self._control(learner))

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        return add_shares(server, updates, lambda update: update.payload, self.info.owners)
