"""FedProx: FedAvg with a proximal term that keeps a client near the weights it received.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. A client minimizes

    f_i(theta) + mu / 2 |theta - w|^2

over its parameters, where w is its part of the global state as received. The term enters as its
gradient, mu (theta - w), before clipping and the optimizer. The reported loss is f_i alone, so it
is comparable with FedAvg's. Over parts of different depths this is the InCo paper's HeteroProx;
with `server.inco` on, its InCoProx.
"""

from __future__ import annotations

from pydantic import Field

from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Proximal, Step


class FedProxSettings(MethodSettings):
    """FedProx's own settings."""

    name: str = "fedprox"
    mu: float = Field(default=0.1, ge=0)
    """Weight of the proximal term. The InCo and FedIN papers use 0.1 (they write mu/2 = 0.05);
    FedProx's authors choose among 0.001, 0.01, 0.1, 0.5 and 1. With Adam the term's gradient is
    rescaled like any other.
    """
    proximal: Proximal = "squared"
    """squared: mu/2 |theta - w|^2. norms: mu/2 times the sum of |theta - w| over tensors, as in
    much public code; its gradient does not grow with the distance. norm-of-squares: mu/2 times the
    sum of |(theta - w)^2| over tensors, the norm of the squares instead of the squared norm; it
    pulls only at the weights of a tensor that are farthest away.
    """


class FedProxClient(ClientAlgorithm):
    """FedAvg, and the gradient of the proximal term."""

    settings: FedProxSettings

    def after_backward(self, step: Step) -> None:
        # grads += mu * (params - received); a private tensor has no global value to stay near
        center = self.shared(step.size, step.received)
        step.proximal(self.settings.mu, center, term=self.settings.proximal)


@METHODS.register(
    "fedprox", "FedAvg with a proximal term, mu / 2 |theta - w|^2", paper="Li et al., MLSys 2020"
)
class FedProx(Method):
    """FedAvg, with another client half."""

    Settings = FedProxSettings
    Client = FedProxClient
    requirements = Requirements(own_training=True, private_parts=True)
