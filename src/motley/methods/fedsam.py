"""FedSAM: FedAvg whose clients look for flat minima.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022; and Caldarola
et al., ECCV 2022. A minimum of one client's loss is often a bad point for the others, and less so
if the loss stays low around it. Each step climbs by rho along its gradient g, takes the gradient
there, and descends with that from where it was:

    g' = gradient at  theta + rho g / |g|,    theta <- theta - lr g'

There are two passes per step; the second one leaves the running statistics as they are after the
first. |g| is the norm over all parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field
from torch import Tensor

from motley.core.tensors import add_, norm, scaled
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Step


class FedSAMSettings(MethodSettings):
    """FedSAM's own setting."""

    name: str = "fedsam"
    rho: float = Field(default=0.05, ge=0)
    """Length of the ascent step before the gradient is computed. 0: FedAvg, at twice the cost."""


class FedSAMClient(ClientAlgorithm):
    """FedAvg with a step of two passes."""

    settings: FedSAMSettings

    def train_step(self, step: Step) -> Tensor:
        loss = self.loss(step)
        step.backward(loss)
        backward_uphill(step, self.loss, self.settings.rho)
        self.descend(step)
        return loss.detach()


def backward_uphill(step: Step, loss: Callable[[Step], Tensor], rho: float) -> None:
    """Replace the gradients of a step by those at the point that is `rho` uphill from here."""
    grads = step.grads
    climb = scaled(grads, rho / (norm(grads) + 1e-12))
    with step.preserve_weights():
        add_(step.params, climb)
        step.sync()
        step.backward(loss(step))


@METHODS.register(
    "fedsam", "FedAvg with sharpness-aware gradients at the clients", paper="Qu et al., ICML 2022"
)
class FedSAM(Method):
    """FedAvg with another step."""

    Settings = FedSAMSettings
    Client = FedSAMClient
    requirements = Requirements(own_training=True, private_parts=True)
