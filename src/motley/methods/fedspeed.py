"""FedSpeed: FedDyn with gradients from a perturbed point, for flatter minima and more local steps.

Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy, ICLR 2023. Each step climbs by rho along its gradient g, takes the gradient g' there,
comes back, and hands the optimizer

    (1 - ascent) g + ascent g' + alpha (theta - w + lambda_i)

The dual variable lambda_i and the server's rule are FedDyn's. There are two passes per step; the
second one leaves the running statistics as they are after the first.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from motley.core.tensors import add_, scale_, scaled
from motley.methods.base import METHODS, Method
from motley.methods.feddyn import FedDyn, FedDynClient, FedDynServer, FedDynSettings
from motley.methods.fedsam import backward_uphill
from motley.methods.step import Step


class FedSpeedSettings(FedDynSettings):
    """FedSpeed's own settings; its paper writes 1 / lambda for alpha, and alpha for `ascent`."""

    name: str = "fedspeed"
    rho: float = Field(default=0.1, ge=0)
    """Length of the ascent step before the gradient is computed."""
    ascent: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the gradient that is computed after the ascent step. The authors' code uses 1."""


class FedSpeedClient(FedDynClient):
    """FedDyn with a step of two passes."""

    settings: FedSpeedSettings

    def train_step(self, step: Step) -> Tensor:
        rho, ascent = self.settings.rho, self.settings.ascent
        loss = self.loss(step)
        step.backward(loss)
        lower = scaled(step.grads, 1 - ascent) if ascent < 1 else {}
        backward_uphill(step, self.loss, rho)
        if ascent < 1:
            grads = step.grads
            scale_(grads, ascent)
            add_(grads, lower)
        self.descend(step)
        return loss.detach()


@METHODS.register(
    "fedspeed", "FedDyn's duals with sharpness-aware gradients", paper="Sun et al., ICLR 2023"
)
class FedSpeed(Method):
    """FedDyn with another step."""

    Settings = FedSpeedSettings
    Client = FedSpeedClient
    Server = FedDynServer
    requirements = FedDyn.requirements
