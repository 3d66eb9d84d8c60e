"""FjORD: a client trains all widths up to its own, one drawn per batch, and the widest teaches the
others.

Horvath et al., FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered
Dropout, NeurIPS 2021. The parts are those of `split.name = "ordered"`. With a width p drawn for the
batch, a client minimizes

    CE(z_p),    or with self-distillation    CE(z_max) + CE(softmax(z_max), detached; z_p)

Over networks of one width this is FedAvg. The width is drawn on the device, and a narrow output is
computed by the wide network with masked channels (`splits/ordered_dropout.py`). No step depends on
the host, but a narrow forward pass costs as much as a wide one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Step
from motley.splits.ordered_dropout import at_width, widths_of


class FjORDSettings(MethodSettings):
    """FjORD's own setting."""

    name: str = "fjord"
    distill: bool = True
    """Train the sampled width with the logits of the widest one as soft targets; doubles the work
    per step.
    """


class FjORDClient(ClientAlgorithm):
    """FedAvg with the loss of a drawn width."""

    settings: FjORDSettings

    def loss(self, step: Step) -> Tensor:
        widths = widths_of(step.model)
        if widths == 1:
            return super().loss(step)
        choice = torch.randint(widths, (1,), device=step.inputs.device)
        if not self.settings.distill:
            with at_width(step.model, choice):
                return super().loss(step)
        widest = step.model(step.inputs)
        with at_width(step.model, choice):
            narrow = step.model(step.inputs)
        distillation = F.cross_entropy(narrow.float(), widest.detach().float().softmax(1))
        return step.task_loss(widest, step.targets) + distillation


@METHODS.register(
    "fjord",
    "a width drawn for each batch, taught by the widest",
    paper="Horvath et al., NeurIPS 2021",
)
class FjORD(Method):
    """FedAvg with another loss."""

    Settings = FjORDSettings
    Client = FjORDClient
    requirements = Requirements(own_training=True, classes=True)
