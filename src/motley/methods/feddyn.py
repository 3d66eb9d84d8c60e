"""FedDyn: a dynamic regularizer that makes local minima agree with the global one.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021. A client minimizes

    f_i(theta) - <grad_i, theta> + alpha / 2 |theta - w|^2

ends at w_i, and updates grad_i. The server updates h, and sets w to the clients' mean minus
h / alpha:

    grad_i <- grad_i - alpha (w_i - w),    h <- h - alpha / N sum of (w_i - w)

Both are kept here divided by -alpha: a client keeps lambda_i, the sum of its deltas so far, and the
server keeps the mean of lambda_i over all N clients that hold a layer, which it adds to their mean
delta. With this, the gradient of the two extra terms is

    alpha (theta - w + lambda_i)

A layer that nobody held this round stays. Parameters only; the server adds its mean after InCo,
which would otherwise rescale it with the delta.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from motley.core.merge import Aggregate, add_shares
from motley.core.part import State
from motley.core.tensors import difference, total
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


class FedDynSettings(MethodSettings):
    """FedDyn's own setting."""

    name: str = "feddyn"
    alpha: float = Field(default=0.1, gt=0)
    """Weight of the dynamic regulariser. FedDyn's authors use 0.01 and 0.1. With Adam its gradient
    is rescaled like any other.
    """


class FedDynClient(ClientAlgorithm):
    """FedProx with a dual variable."""

    settings: FedDynSettings

    def initial_client_state(self, size: str, received: State) -> State:
        names = self.info.split.parameters_of(size)
        return {n: torch.zeros_like(tensor) for n, tensor in received.items() if n in names}

    def before_training(self, step: Step) -> None:
        # Steps are drawn to the same w - lambda_i in the whole round.
        step.keep("center", difference(step.received, step.client_state))

    def after_backward(self, step: Step) -> None:
        # grads += alpha * (params - (received - lambda_i))
        step.proximal(self.settings.alpha, step.scratch["center"])

    def finish(self, step: Step) -> tuple[State, State]:
        # lambda_i <- lambda_i + (theta - w)
        delta = difference(step.params, step.received)
        return {}, total(step.client_state, delta)


class FedDynServer(ServerAlgorithm):
    """FedAvg, plus the mean of all clients' dual variables."""

    settings: FedDynSettings

    def init(self) -> State:
        return self.info.split.zeros()

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        # mean of lambda <- mean of lambda + (sum of deltas) / N
        return add_shares(own, updates, lambda update: update.delta, self.info.owners)

    def adjust_aggregate(self, own: State, merged: Aggregate) -> Aggregate:
        return merged.with_delta({**merged.delta, **total(merged.delta, own)})


@METHODS.register(
    "feddyn", "dynamic regularisation: duals at clients and server", paper="Acar et al., ICLR 2021"
)
class FedDyn(Method):
    """FedProx with dual variables at clients and server."""

    Settings = FedDynSettings
    Client = FedDynClient
    Server = FedDynServer
    requirements = Requirements(
        client_state=True, own_training=True, own_aggregation=True, private_parts=True
    )
