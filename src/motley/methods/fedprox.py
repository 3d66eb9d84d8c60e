"""FedProx: FedAvg, and a pull towards the weights that the client received.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. A client minimises

    f_i(theta) + mu / 2 |theta - w|^2

over its parameters, w being its own part of the global state as it was when the turn began. The term enters as its
gradient, mu (theta - w), before clipping and the optimiser; the reported loss is f_i alone, comparable with FedAvg's.
Over parts of unlike depth this is the InCo paper's HeteroProx; with `method.inco` on, its InCoProx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from motley.methods.base import METHODS, Method, MethodSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


Proximal: TypeAlias = Literal["squared", "norms"]
"""The term: mu / 2 |theta - w|^2, or, as in much public code, mu / 2 times the sum of every tensor's |theta - w|, whose
pull does not grow with the distance.
"""


class FedProxSettings(MethodSettings):
    """FedProx's own settings."""

    name: str = "fedprox"
    mu: float = Field(default=0.1, ge=0)
    """Weight of the proximal term. The InCo and FedIN papers use 0.1 (they write mu/2 = 0.05); FedProx's authors
    choose among 0.001, 0.01, 0.1, 0.5 and 1. With Adam the term's gradient is rescaled like any other.
    """
    proximal: Proximal = "squared"
    """squared: mu/2 |theta - w|^2. norms: mu/2 times the sum of |theta - w| over tensors, as in much public code; its
    gradient does not grow with the distance.
    """


@METHODS.register("fedprox", "FedAvg with a proximal term, mu / 2 |theta - w|^2", paper="Li et al., MLSys 2020")
class FedProx(Method):
    """FedAvg, and this gradient."""

    Settings = FedProxSettings
    settings: FedProxSettings

    def after_backward(self, learner: Learner) -> None:
        learner.pull(self.settings.mu, by_norms=self.settings.proximal == "norms")
