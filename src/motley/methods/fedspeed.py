"""FedSpeed: FedDyn with gradients from the edge of a ball, for flatter minima and longer turns.

Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy, ICLR 2023.
Each step climbs by rho along its gradient g, takes the gradient g' there, comes back, and hands the optimiser

    (1 - ascent) g + ascent g' + alpha (theta - w + lambda_i)

The dual variable lambda_i and the server's rule are FedDyn's. Two passes a step; the second leaves the running
statistics as the first made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from motley.methods.base import METHODS
from motley.methods.feddyn import FedDyn, FedDynSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class FedSpeedSettings(FedDynSettings):
    """FedSpeed's own settings; its paper writes 1 / lambda for alpha, and alpha for `ascent`."""

    name: str = "fedspeed"
    rho: float = Field(default=0.1, ge=0)
    """Length of the ascent step before the gradient is computed."""
    ascent: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the gradient that is computed after the ascent step. The authors' code uses 1."""


@METHODS.register("fedspeed", "FedDyn's duals with sharpness-aware gradients", paper="Sun et al., ICLR 2023")
class FedSpeed(FedDyn):
    """FedDyn with a step of its own."""

    Settings = FedSpeedSettings
    settings: FedSpeedSettings

    def step(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(learner, images, labels)
        learner.backward(loss)
        rho, ascent = self.settings.rho, self.settings.ascent
        norm = torch.stack(torch._foreach_norm(learner.gradients)).norm()
        climb = torch._foreach_mul(learner.gradients, rho / (norm + 1e-12))
        below = torch._foreach_mul(learner.gradients, 1 - ascent) if ascent < 1 else ()
        with learner.excursion():
            torch._foreach_add_(learner.trained, climb)
            learner.publish()
            learner.backward(self.loss(learner, images, labels))
        if below:
            torch._foreach_mul_(learner.gradients, ascent)
            torch._foreach_add_(learner.gradients, below)
        self.descend(learner)
        return loss.detach()
