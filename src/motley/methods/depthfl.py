"""DepthFL: all exits of a model learn, and each one teaches the others, on top of FedDyn.

Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023. The parts
are those of `split.name = "grid"` with rates of 1. A client with d exits minimizes

    sum over i of CE(z_i) + w(t) / (d - 1)  sum over i and j != i of KL(z_j, detached || z_i)

with w(t) = exp(-5 (1 - min(t, ramp) / ramp)^2), and FedDyn's regularizer on its parameters, whose
server rule is over the owners of each layer. The output of a size is the mean of its exits
(`split.output = "mean"`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from motley.methods.base import METHODS, Method
from motley.methods.feddyn import FedDyn, FedDynClient, FedDynServer, FedDynSettings
from motley.methods.scalefl import divergence
from motley.methods.step import Step
from motley.splits.exits import exit_logits_of


class DepthFLSettings(FedDynSettings):
    """DepthFL's own settings."""

    name: str = "depthfl"
    distill: bool = True
    """Distil between the exits of a model."""
    ramp: int = Field(default=300, ge=1)
    """Rounds until the distillation has its full weight."""


class DepthFLClient(FedDynClient):
    """FedDyn with the loss of all exits."""

    settings: DepthFLSettings

    def loss(self, step: Step) -> Tensor:
        exits = exit_logits_of(step.model, step.inputs)
        total = torch.stack([step.task_loss(logits, step.targets) for logits in exits]).sum()
        if len(exits) == 1 or not self.settings.distill:
            return total
        divergences = []
        for place, student in enumerate(exits):
            for other, teacher in enumerate(exits):
                if other != place:
                    divergences.append(divergence(teacher.detach().float(), student.float()))
        mutual = torch.stack(divergences).sum()
        left = 1 - (step.round / self.settings.ramp).clamp(max=1)
        return total + (-5 * left * left).exp() * mutual / (len(exits) - 1)


@METHODS.register(
    "depthfl", "FedDyn with exits that teach each other", paper="Kim et al., ICLR 2023"
)
class DepthFL(Method):
    """FedDyn with another loss."""

    Settings = DepthFLSettings
    Client = DepthFLClient
    Server = FedDynServer
    requirements = replace(FedDyn.requirements, classes=True)
