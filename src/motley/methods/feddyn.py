"""FedDyn: a dynamic regulariser that makes local minima agree with the global one.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021. A client minimises

    f_i(theta) - <grad_i, theta> + alpha / 2 |theta - w|^2,    then    grad_i <- grad_i - alpha (w_i - w)

and the server keeps h <- h - alpha / N (sum of w_i - w) and sets w to the clients' mean less h / alpha. Both are kept
here divided by -alpha: a client remembers lambda_i, the sum of its changes so far, and the server the mean of lambda_i
over all N clients that hold a layer, which it adds to their mean change. A layer that nobody held this round stays.

Parameters only; the server adds its mean after InCo, which would rescale it with the change otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from motley.core.merge import Aggregate, add_shares
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class FedDynSettings(MethodSettings):
    """FedDyn's own setting."""

    name: str = "feddyn"
    alpha: float = Field(default=0.1, gt=0)
    """Weight of the dynamic regulariser. FedDyn's authors use 0.01 and 0.1. With Adam its gradient is rescaled like
    any other.
    """


@METHODS.register("feddyn", "dynamic regularisation: duals at clients and server", paper="Acar et al., ICLR 2021")
class FedDyn(Method):
    """FedProx with a dual variable."""

    Settings = FedDynSettings
    settings: FedDynSettings

    def init(self) -> State:
        return self.info.split.zeros()

    def initial_client_state(self, size: str, received: State) -> State:
        own = self.info.split.parameters_of(size)
        return {name: torch.zeros_like(tensor) for name, tensor in received.items() if name in own}

    def after_backward(self, learner: Learner) -> None:
        towards = torch._foreach_sub(learner.anchors, learner.in_order(learner.memory))
        learner.pull(self.settings.alpha, towards)

    def next_client_state(self, learner: Learner) -> State:
        changes = torch._foreach_sub(learner.trained, learner.anchors)
        return learner.by_name(torch._foreach_add(learner.in_order(learner.memory), changes))

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        return add_shares(server, updates, lambda update: update.delta, self.info.owners)

    def adjust_aggregate(self, server: State, merged: Aggregate) -> Aggregate:
        own = [name for name in merged.delta if name in server]
        sums = torch._foreach_add([merged.delta[name] for name in own], [server[name] for name in own])
        return merged.with_delta({**merged.delta, **dict(zip(own, sums, strict=True))})
