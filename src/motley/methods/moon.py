"""MOON: representations near the global model's and away from the client's previous one.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021. To the cross entropy a client adds mu times

    -log( e^(cos(z, z_global) / T) / (e^(cos(z, z_global) / T) + e^(cos(z, z_previous) / T)) )

where z is the representation of an image by the model in training, by the part that the client received, and by its own
model at the end of its last turn. The two companions answer in evaluation mode, without gradient. In a client's first
turn both are the received part, and the term has no gradient.

z is what enters the last layer. The authors put a projection of two layers before it: `model.projection = 256`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from motley.core.part import State
from motley.methods.base import METHODS, FederationInfo, Method, MethodSettings
from motley.models.projection import representation_and_answer
from motley.models.stages import chain_of

if TYPE_CHECKING:
    from motley.engine.learner import Learner


class MoonSettings(MethodSettings):
    """MOON's own settings."""

    name: str = "moon"
    mu: float = Field(default=1.0, ge=0)
    """Weight of the contrastive term. MOON's authors choose among 0.001, 0.01, 0.1, 1, 5 and 10."""
    temperature: float = Field(default=0.5, gt=0)
    """Temperature of the contrastive term."""


@METHODS.register("moon", "FedAvg with a contrastive loss on representations", paper="Li et al., CVPR 2021")
class Moon(Method):
    """FedAvg, and this loss: two more forward passes a step, and a model a client to remember."""

    Settings = MoonSettings
    settings: MoonSettings

    def __init__(self, settings: MethodSettings, world: FederationInfo) -> None:
        super().__init__(settings, world)
        for blueprint in world.split.blueprints.values():
            chain_of(blueprint.module)

    def initial_client_state(self, size: str, received: State) -> State:
        return received

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        own, answer = representation_and_answer(learner.model, images)
        near, far = (
            F.cosine_similarity(own.float(), learner.frozen(state, images, _representation).float())
            for state in (learner.start, learner.memory)
        )
        contrast = F.softplus((far - near) / self.settings.temperature).mean()
        return learner.cross_entropy(answer, labels) + self.settings.mu * contrast

    def next_client_state(self, learner: Learner) -> State:
        return {name: tensor.detach() for name, tensor in learner.tensors.items()}


def _representation(model: nn.Module, images: Tensor) -> Tensor:
    return representation_and_answer(model, images)[0]
