"""FedRep: every client has a private head, which it trains before the shared body.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
(Algorithm 1). In a round, a client with head h_i receives the body phi and computes

    h_i <- h_i after tau_h steps on f_i(h, phi), with phi fixed
    phi_i <- phi after further steps on f_i(h_i, phi), with h_i fixed

The server averages the bodies. The steps on the head are `head_epochs` epochs, and those on the
body `training.epochs` epochs after them. `split.private` names the head's tensors (by default the
model's head); the body is the rest. Each of the two has an optimizer of its own. Running statistics
belong to the second phase: in the first, batches are normalized by their own statistics, and the
running ones stay as they are.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.info import FederationInfo
from motley.methods.step import Step

HEAD, BODY = 0, 1


class FedRepSettings(MethodSettings):
    """FedRep's own setting."""

    name: str = "fedrep"
    head_epochs: float = Field(default=1.0, gt=0)
    """Local epochs that train the private tensors, before `training.epochs` epochs of the others.
    FedRep's authors use 10 before 1 to 5.
    """


class FedRepClient(ClientAlgorithm):
    """FedAvg in two phases: the private parameters, then the shared ones."""

    settings: FedRepSettings
    num_phases = 2

    def phase(self, step: Step, step_number: int) -> int:
        head_steps = round(self.settings.head_epochs * step.epoch_steps)
        return HEAD if step_number < head_steps else BODY

    def train_step(self, step: Step) -> Tensor:
        private = self.info.split.private[step.size]
        if step.phase == HEAD:
            names = [name for name in step.params if name in private]
            with step.preserve_buffers():
                loss = self.loss(step)
                step.backward(loss, names)
        else:
            names = [name for name in step.params if name not in private]
            loss = self.loss(step)
            step.backward(loss, names)
        step.optimize(names, clip=True)
        return loss.detach()


@METHODS.register(
    "fedrep", "a private head, trained before the shared body", paper="Collins et al., ICML 2021"
)
class FedRep(Method):
    """FedAvg of bodies, with another client half."""

    Settings = FedRepSettings
    Client = FedRepClient
    settings: FedRepSettings
    requirements = Requirements(own_training=True, private_parts=True, needs_private_parts=True)

    def __init__(self, settings: FedRepSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        self.extra_epochs = settings.head_epochs
        for size, private in info.split.private.items():
            parameters = {name for name, _ in info.split.blueprints[size].module.named_parameters()}
            if not private & parameters or parameters <= private:
                raise MotleyError(
                    f"split.private = {list(info.split.settings.private)}: method.name = 'fedrep' "
                    f"trains private parameters, then shared ones, and {size!r} has not both. "
                    "Use split.private = 'head'."
                )
