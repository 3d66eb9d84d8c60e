"""DepthFL: all exits learn, and each teaches each, over FedDyn.

Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023. The parts are those of
`split.name = "grid"` with rates of 1. A client with d exits minimises

    sum over i of CE(z_i) + w(t) / (d - 1)  sum over i and j != i of KL(z_j, detached || z_i)

with w(t) = exp(-5 (1 - min(t, ramp) / ramp)^2), and FedDyn's regulariser on its parameters, whose server rule is over
the owners of each layer. A size answers with the mean of its exits (`split.output = "mean"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from motley.methods.base import METHODS
from motley.methods.feddyn import FedDyn, FedDynSettings
from motley.methods.scalefl import divergence
from motley.splits.exits import answers_of

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class DepthFLSettings(FedDynSettings):
    """DepthFL's own settings."""

    name: str = "depthfl"
    distill: bool = True
    """Distil between the exits of a model."""
    ramp: int = Field(default=300, ge=1)
    """Rounds until the distillation has its full weight."""


@METHODS.register("depthfl", "FedDyn with exits that teach each other", paper="Kim et al., ICLR 2023")
class DepthFL(FedDyn):
    """FedDyn, and this loss."""

    Settings = DepthFLSettings
    settings: DepthFLSettings

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        answers = answers_of(learner.model, images)
        total = torch.stack([learner.cross_entropy(answer, labels) for answer in answers]).sum()
        if len(answers) == 1 or not self.settings.distill:
            return total
        mutual = torch.stack(
            [
                divergence(teacher.detach().float(), student.float())
                for place, student in enumerate(answers)
                for other, teacher in enumerate(answers)
                if other != place
            ]
        ).sum()
        left = 1 - (learner.round / self.settings.ramp).clamp(max=1)
        return total + (-5 * left * left).exp() * mutual / (len(answers) - 1)
