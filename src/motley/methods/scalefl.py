"""ScaleFL: every exit learns, the deeper ones count more, and the deepest teaches the others.

Ilhan, Su and Liu, ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients, CVPR 2023. The parts are
those of `split.name = "grid"`. A client with exits 1 to L minimises

    sum over j of  j l_j / (L (L + 1) / 2),    l_L = CE(z_L),    l_j = CE(z_j) + gamma T^2 KL(z_L / T || z_j / T)

and the distillation begins after a quarter of the rounds. The released command leaves gamma at 0, does not detach the
teacher, and means the divergence over classes too: each is a setting. With one exit this is FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.methods.base import METHODS, Method, MethodSettings
from motley.models.exits import answers_of

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class ScaleFLSettings(MethodSettings):
    """ScaleFL's own settings."""

    name: str = "scalefl"
    gamma: float = Field(default=0.05, ge=0)
    """Weight of the distillation loss. The released command for images uses 0; for text the authors use 0.05."""
    temperature: float = Field(default=3.0, gt=0)
    """Temperature of the distillation."""
    begin: float = Field(default=0.25, ge=0, le=1)
    """Fraction of the rounds before the distillation begins."""
    teacher: str = Field(default="detached", pattern="^(detached|trained)$")
    """detached: the distillation does not train the deepest exit. trained: it does, as in the released code."""
    mean_over_classes: bool = False
    """Divide the divergence by the number of classes, as in the released code."""


@METHODS.register("scalefl", "all exits learn, and the deepest teaches the others", paper="Ilhan et al., CVPR 2023")
class ScaleFL(Method):
    """FedAvg, and this loss."""

    Settings = ScaleFLSettings
    uses_total_rounds = True  # `begin` is a fraction of them
    settings: ScaleFLSettings

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        *early, last = answers_of(learner.model, images)
        if not early:
            return learner.cross_entropy(last, labels)
        exits = len(early) + 1
        teacher = last.detach() if self.settings.teacher == "detached" else last
        begun = (learner.round > self.settings.begin * self.info.rounds).float()
        total = exits * learner.cross_entropy(last, labels)
        for number, answer in enumerate(early, 1):
            taught = self.settings.gamma * begun * self._divergence(teacher, answer)
            total = total + number * (learner.cross_entropy(answer, labels) + taught)
        return total / (exits * (exits + 1) / 2)

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        t = self.settings.temperature
        classes = student.shape[1] if self.settings.mean_over_classes else 1
        return t * t * divergence(teacher.float() / t, student.float() / t) / classes


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of two batches of answers, a mean over examples."""
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
