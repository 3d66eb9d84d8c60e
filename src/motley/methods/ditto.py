"""Ditto: a personal model beside the global one, kept near it by a proximal term.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (Algorithm
1). The global model is trained as by FedAvg. With every local step for it, a client also takes a
step for its personal model v_i,

    v_i <- v_i - lr (grad f_i(v_i) + lambda (v_i - w))

where w is the global model as the client received it. v_i stays at the client, as client state, and
is the model that is evaluated. It starts from the first global model that the client receives. With
lambda = 0 it is local training. Both steps are on the same batch, and each of the two models has an
optimizer of its own. Every model has its own running statistics.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from motley.core.part import State
from motley.core.tensors import swap_
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.step import Step


class DittoSettings(MethodSettings):
    """Ditto's own setting."""

    name: str = "ditto"
    weight: float = Field(default=0.1, ge=0)
    """Weight of the proximal term (the paper's lambda): 0 is local training, and the larger it is,
    the nearer personal models stay to the global one. With Adam the term's gradient is rescaled
    like any other.
    """


class DittoClient(ClientAlgorithm):
    """FedAvg, and a second model that is trained in turns with the first."""

    settings: DittoSettings

    def initial_client_state(self, size: str, received: State) -> State:
        return received

    def before_training(self, step: Step) -> None:
        step.keep("personal", step.client_state)

    def train_step(self, step: Step) -> Tensor:
        loss = super().train_step(step)
        personal = step.scratch["personal"]
        swap_(step.state, personal)
        step.sync()
        step.backward(self.loss(step))
        # grads += lambda (v - w)
        step.proximal(self.settings.weight)
        step.optimize(step.params, clip=True)
        swap_(step.state, personal)
        step.sync()
        return loss

    def finish(self, step: Step) -> tuple[State, State]:
        return {}, step.scratch["personal"]

    def personal_model(self, client_state: State) -> State:
        return client_state


@METHODS.register(
    "ditto", "FedAvg, and a personal model kept near the global one", paper="Li et al., ICML 2021"
)
class Ditto(Method):
    """FedAvg with a personal model: two passes per step, and one model of state per client."""

    Settings = DittoSettings
    Client = DittoClient
    requirements = Requirements(client_state=True, own_training=True, personal_model=True)
