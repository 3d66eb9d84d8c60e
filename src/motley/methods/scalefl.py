"""ScaleFL: every exit of a model learns, deeper ones count more, and the deepest teaches the
others.

Ilhan, Su and Liu, ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients, CVPR
2023. The parts are those of `split.name = "grid"`. A client with exits 1 to L minimizes

    sum over j of  j l_j / (L (L + 1) / 2),
    l_L = CE(z_L),    l_j = CE(z_j) + gamma T^2 KL(z_L / T || z_j / T)

and the distillation begins after a quarter of the rounds. The released command leaves gamma at 0,
does not detach the teacher, and averages the divergence over classes too: each is a setting. With
one exit this is FedAvg.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Step
from motley.splits.exits import exit_logits_of


class ScaleFLSettings(MethodSettings):
    """ScaleFL's own settings."""

    name: str = "scalefl"
    gamma: float = Field(default=0.05, ge=0)
    """Weight of the distillation loss. The released command for images uses 0; for text the authors
    use 0.05.
    """
    temperature: float = Field(default=3.0, gt=0)
    """Temperature of the distillation."""
    begin: float = Field(default=0.25, ge=0, le=1)
    """Fraction of the rounds before the distillation begins."""
    teacher: str = Field(default="detached", pattern="^(detached|trained)$")
    """detached: the distillation does not train the deepest exit. trained: it does, as in the
    released code.
    """
    mean_over_classes: bool = False
    """Divide the divergence by the number of classes, as in the released code."""


class ScaleFLClient(ClientAlgorithm):
    """FedAvg with the loss of all exits."""

    settings: ScaleFLSettings

    def loss(self, step: Step) -> Tensor:
        *early, last = exit_logits_of(step.model, step.inputs)
        if not early:
            return step.task_loss(last, step.targets)
        exits = len(early) + 1
        teacher = last.detach() if self.settings.teacher == "detached" else last
        begun = (step.round > self.settings.begin * self.info.training.rounds).float()
        total = exits * step.task_loss(last, step.targets)
        for number, logits in enumerate(early, 1):
            distillation = self.settings.gamma * begun * self._divergence(teacher, logits)
            total = total + number * (step.task_loss(logits, step.targets) + distillation)
        return total / (exits * (exits + 1) / 2)

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        t = self.settings.temperature
        classes = student.shape[1] if self.settings.mean_over_classes else 1
        return t * t * divergence(teacher.float() / t, student.float() / t) / classes


@METHODS.register(
    "scalefl",
    "all exits learn, and the deepest teaches the others",
    paper="Ilhan et al., CVPR 2023",
)
class ScaleFL(Method):
    """FedAvg with another loss."""

    Settings = ScaleFLSettings
    Client = ScaleFLClient
    requirements = Requirements(own_training=True, classes=True, uses_total_rounds=True)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of two batches of logits, the mean over examples."""
    return F.kl_div(
        student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True
    )
