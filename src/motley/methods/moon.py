"""MOON: representations near the global model's and far from the client's previous one.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021. To the cross-entropy a client adds
mu times

    -log( e^(cos(z, z_global) / T) / (e^(cos(z, z_global) / T) + e^(cos(z, z_previous) / T)) )

where z is the representation of an image by the model in training, by the part that the client
received, and by its own model at the end of its last training. The two companion models run in
evaluation mode, without gradient. The first time that a client trains, both are the received part,
and the term has no gradient.

z is the input of the last layer. The authors put a projection of two layers before it:
`model.projection = 256`.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from motley.core.part import State
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Step
from motley.models.projection import representation_and_answer


class MoonSettings(MethodSettings):
    """MOON's own settings."""

    name: str = "moon"
    mu: float = Field(default=1.0, ge=0)
    """Weight of the contrastive term. MOON's authors choose among 0.001, 0.01, 0.1, 1, 5 and 10."""
    temperature: float = Field(default=0.5, gt=0)
    """Temperature of the contrastive term."""


class MoonClient(ClientAlgorithm):
    """FedAvg, and the contrastive term. The client's state is its model after its last training."""

    settings: MoonSettings

    def initial_client_state(self, size: str, received: State) -> State:
        return received

    def loss(self, step: Step) -> Tensor:
        z, logits = representation_and_answer(step.model, step.inputs)
        z_global = step.frozen(step.received, step.inputs, _representation)
        z_previous = step.frozen(step.client_state, step.inputs, _representation)
        # A representation has one vector per example, or one per position of a sequence.
        near = F.cosine_similarity(z.float(), z_global.float(), dim=-1)
        far = F.cosine_similarity(z.float(), z_previous.float(), dim=-1)
        # -log(e^a / (e^a + e^b)) = softplus(b - a)
        contrast = F.softplus((far - near) / self.settings.temperature).mean()
        return step.task_loss(logits, step.targets) + self.settings.mu * contrast

    def finish(self, step: Step) -> tuple[State, State]:
        return {}, step.state


@METHODS.register(
    "moon", "FedAvg with a contrastive loss on representations", paper="Li et al., CVPR 2021"
)
class Moon(Method):
    """FedAvg with another loss: two more forward passes per step, and one model of state per
    client.
    """

    Settings = MoonSettings
    Client = MoonClient
    requirements = Requirements(
        client_state=True, own_training=True, stages=True, private_parts=True
    )


def _representation(model: nn.Module, inputs: Tensor) -> Tensor:
    return representation_and_answer(model, inputs)[0]
