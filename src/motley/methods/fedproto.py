"""FedProto: clients with models of their own share one prototype per class.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022. The
prototype of a class is the mean of the features of its images, where the features f(x) are the
input of the last layer. A client minimizes

    CE(model(x), y) + weight * mean over the batch and the features of (f(x) - P[y])^2

where P are the global prototypes (Eq. 7, with the squared distance of the authors' code). It sends
its own prototypes, and the server's new P[y] is their mean over the clients that have class y. No
weights are exchanged, so the models may be unrelated; only their features need the same width.

Where paper and code leave a choice:

- A client's prototypes are the means over its last local epoch, collected while it trains, as in
  the authors' code. A pass after training would cost a third of an epoch more.
- All clients of the round that have a class count equally, as in the authors' code. The paper's
  Eq. 6 weighs them by their examples of the class: `weighting = "samples"`.
- A class that no client of a round has keeps its prototype. An image of a class without a prototype
  adds nothing to the second term.

The classifier makes the predictions. The record's metric `method/prototype_accuracy` is the
accuracy of the nearest global prototype, which the paper uses for inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import (
    METHODS,
    REPORTED,
    ClientAlgorithm,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.class_means import (
    add_to_sums,
    check_payload,
    class_means,
    mean_over_clients,
    start_sums,
)
from motley.methods.evaluation import TestSums
from motley.methods.info import ClientInfo, FederationInfo
from motley.methods.step import Step
from motley.models.projection import representation_and_answer, representation_width


class FedProtoSettings(MethodSettings):
    """FedProto's own settings."""

    name: str = "fedproto"
    weight: float = Field(default=1.0, ge=0)
    """Weight of the distance to the global prototypes. The authors use 1 for MNIST and FEMNIST, and
    0.1 for CIFAR-10.
    """
    weighting: Literal["uniform", "samples"] = "uniform"
    """Clients' weights in the mean of a class. uniform: all that have the class count equally, as
    in the authors' code. samples: proportional to their examples of the class (Eq. 6).
    """


class FedProtoClient(ClientAlgorithm):
    """Cross-entropy, and the distance of features to the global prototypes of their classes."""

    settings: FedProtoSettings

    def before_training(self, step: Step) -> None:
        width = step.broadcast["prototypes"].shape[1]
        before_last_epoch = step.total_steps - step.epoch_steps
        start_sums(step, self.info.classes, width, before_last_epoch)
        step.keep("prototypes", {"loss": torch.zeros((), device=step.round.device)})

    def loss(self, step: Step) -> Tensor:
        features, logits = representation_and_answer(step.model, step.inputs)
        features = features.float()
        add_to_sums(step, features)
        prototypes = step.broadcast["prototypes"][step.targets]
        known = step.broadcast["known"][step.targets]
        distance = ((features - prototypes).square() * known[:, None]).mean()
        step.scratch["prototypes"]["loss"].add_(distance.detach())
        return step.task_loss(logits, step.targets) + self.settings.weight * distance

    def finish(self, step: Step) -> tuple[State, State]:
        payload = class_means(step, counted=self.settings.weighting == "samples")
        mean_loss = step.scratch["prototypes"]["loss"] / step.num_steps
        return {**payload, REPORTED + "prototype_loss": mean_loss}, {}

    def evaluate(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        prototypes, known = step.broadcast["prototypes"], step.broadcast["known"]
        classifier = TestSums(self.info.task, self.info.classes, step.round.device)
        nearest = TestSums(self.info.task, self.info.classes, step.round.device)
        for inputs, targets in batches:
            features, logits = representation_and_answer(step.model, inputs)
            classifier.add(logits, targets)
            # Without products of matrices, which a GPU may round to tf32.
            distances = torch.cdist(
                features, prototypes, compute_mode="donot_use_mm_for_euclid_dist"
            )
            nearest.add(-distances.masked_fill(known == 0, torch.inf), targets)
        return {**classifier.values(), REPORTED + "prototype_accuracy": nearest.accuracy}


class FedProtoServer(ServerAlgorithm):
    """The global prototypes: one vector per class, and whether the class has one."""

    settings: FedProtoSettings

    def init(self) -> State:
        width = feature_width(self.info)
        classes = self.info.classes
        return {"prototypes": torch.zeros((classes, width)), "known": torch.zeros(classes)}

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        return own

    def evaluation_broadcast(self, own: State) -> State:
        return own

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        classes, width = own["prototypes"].shape
        for update in updates:
            check_payload(update, classes, width)
        mean, known = mean_over_clients([update.payload for update in updates])
        prototypes = torch.where(known[:, None] > 0, mean, own["prototypes"])
        return {"prototypes": prototypes, "known": torch.maximum(known, own["known"])}

    def metrics(self, own: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        return {**super().metrics(own, updates), "known_classes": own["known"].sum()}


@METHODS.register(
    "fedproto",
    "models of clients' own, with one shared prototype per class",
    paper="Tan et al., AAAI 2022",
)
class FedProto(Method):
    """No weights are exchanged: only the means of features, per class."""

    Settings = FedProtoSettings
    Client = FedProtoClient
    Server = FedProtoServer
    requirements = Requirements(
        payload=True,
        own_training=True,
        own_aggregation=True,
        stages=True,
        classes=True,
        exchanges_weights=False,
    )

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        feature_width(info)


def feature_width(info: FederationInfo | ClientInfo) -> int:
    """Return the width of all sizes' features; raise an error if they have different ones."""
    widths = {}
    for size, blueprint in info.split.blueprints.items():
        widths[size] = representation_width(blueprint.module, info.input_shape)
    if len(set(widths.values())) > 1:
        given = ", ".join(f"{size} {width}" for size, width in widths.items())
        largest = max(widths.values())
        raise MotleyError(
            "method.name = 'fedproto': prototypes are shared by all sizes, so the features before "
            f"the last layer must have one width. The widths of model.sizes are: {given}. Choose "
            f"models of one width, or set model.projection = {largest}, which puts a projection of "
            "that width before every last layer."
        )
    return next(iter(widths.values()))
