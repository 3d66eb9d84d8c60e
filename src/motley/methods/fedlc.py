"""FedLC: FedAvg with a loss that asks for larger margins for the rare classes of a client.

Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022. A
client minimizes the cross-entropy of calibrated logits,

    - log( exp(z_y - tau n_y^(-1/4)) / sum over classes c of exp(z_c - tau n_c^(-1/4)) )

where n_c of its examples are of class c. Without this, the many examples of a client's frequent
classes push down the logits of all others. A class that a client does not have is left out of the
sum, as in fluke's implementation. The evaluated model has plain logits.

Label smoothing is refused. It would give each class that a client does not have a share of every
target, which only a logit above the largest margin could meet: the client's model would predict
these classes for every input.

`training.logit_adjustment` is the same idea with tau log(n_c / n), for any method.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.info import FederationInfo
from motley.methods.step import Step

#: Takes the place of an infinite margin: exp(-50) is 0 beside any other class.
HUGE = 50.0


class FedLCSettings(MethodSettings):
    """FedLC's own settings."""

    name: str = "fedlc"
    tau: float = Field(default=1.0, ge=0)
    """Strength of the calibration. 0: FedAvg."""


class FedLCClient(ClientAlgorithm):
    """FedAvg with calibrated logits."""

    settings: FedLCSettings

    def before_training(self, step: Step) -> None:
        counts = step.class_counts(self.info.classes)
        step.keep("calibration", {"margins": margins(counts, self.settings.tau)})

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs).float()
        return step.task_loss(logits - step.scratch["calibration"]["margins"], step.targets)


def margins(counts: Tensor, tau: float) -> Tensor:
    """Return by how much the logit of each class is lowered, given the numbers of examples."""
    if not tau:
        return torch.zeros_like(counts)
    return torch.where(counts > 0, tau * counts.clamp(min=1) ** -0.25, HUGE)


@METHODS.register(
    "fedlc",
    "FedAvg with logits calibrated by how often a client has each class",
    paper="Zhang et al., ICML 2022",
)
class FedLC(Method):
    """FedAvg with another loss."""

    Settings = FedLCSettings
    Client = FedLCClient
    requirements = Requirements(own_training=True, classes=True, private_parts=True)

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        smoothing = info.training.label_smoothing
        if smoothing:
            raise MotleyError(
                f"training.label_smoothing = {smoothing:g}: gives a part of every target to "
                "classes that a client does not have, and method.name = 'fedlc' leaves these "
                "classes out of the loss. Use training.label_smoothing = 0."
            )
