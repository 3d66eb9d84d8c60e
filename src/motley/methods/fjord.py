"""FjORD: a client trains all widths up to its own, one that is drawn for each batch, and the widest teaches the others.

Horvath et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout, NeurIPS
2021. The parts are those of `split.name = "ordered"`. With a width p drawn for the batch, a client minimises

    CE(z_p),    or with self-distillation    CE(z_max) + CE(softmax(z_max), detached; z_p)

Over networks of one width this is FedAvg. The width is drawn on the device, and narrower answers are masked wide ones
(`splits/ordered_dropout.py`): no step depends on the host, and a narrow answer costs as much as a wide one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.methods.base import METHODS, Method, MethodSettings
from motley.splits.ordered_dropout import narrowed, widths_of

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class FjORDSettings(MethodSettings):
    """FjORD's own setting."""

    name: str = "fjord"
    distill: bool = True
    """Train the sampled width with the logits of the widest one as soft targets; doubles the work per step."""


@METHODS.register("fjord", "a width drawn for each batch, taught by the widest", paper="Horvath et al., NeurIPS 2021")
class FjORD(Method):
    """FedAvg, and this loss."""

    Settings = FjORDSettings
    settings: FjORDSettings

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        widths = widths_of(learner.model)
        if widths == 1:
            return super().loss(learner, images, labels)
        choice = torch.randint(widths, (1,), device=images.device)
        if not self.settings.distill:
            with narrowed(learner.model, choice):
                return super().loss(learner, images, labels)
        widest = learner.model(images)
        with narrowed(learner.model, choice):
            drawn = learner.model(images)
        taught = F.cross_entropy(drawn.float(), widest.detach().float().softmax(1))
        return learner.cross_entropy(widest, labels) + taught
