"""FD: clients with models of their own distill each other's mean outputs per class.

Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data, NeurIPS 2018 workshop. While it trains, a client averages
its model's outputs over the examples of each class and sends these averages. In the next round
client i minimizes

    CE(model(x), y) + gamma * CE(model(x), F_i[y]),    F_i[y] = mean over clients j != i of F_j[y]

where F_j[y] is client j's average for class y. No weights are exchanged, so the models may be
unrelated.

- The paper averages outputs after the softmax; HtFLlib averages logits and takes the softmax of
  their mean: `outputs = "logits"`.
- The paper leaves the client itself out of the mean; HtFLlib does not: `average = "all"`.
- The averages are over the last round's clients. An image of a class that none of them has adds
  nothing to the second term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

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
    MEANS,
    WEIGHTS,
    add_to_sums,
    check_payload,
    class_means,
    mean_over_clients,
    start_sums,
)
from motley.methods.step import Step


class FDSettings(MethodSettings):
    """FD's own settings."""

    name: str = "fd"
    gamma: float = Field(default=1.0, ge=0)
    """Weight of the distillation."""
    average: Literal["others", "all"] = "others"
    """Clients whose outputs a client distills. others: all but the client itself, as in the paper.
    all: the client too, as in HtFLlib.
    """
    outputs: Literal["probabilities", "logits"] = "probabilities"
    """Outputs that are averaged. probabilities: after the softmax, as in the paper. logits: before
    it, as in HtFLlib; the softmax of their mean is distilled.
    """


class FDClient(ClientAlgorithm):
    """Cross-entropy, and the cross-entropy with the other clients' mean outputs for the class."""

    settings: FDSettings

    def before_training(self, step: Step) -> None:
        start_sums(step, self.info.classes, self.info.classes)
        step.keep("distillation", {"loss": torch.zeros((), device=step.round.device)})

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs).float()
        log_probabilities = logits.log_softmax(1)
        averages_logits = self.settings.outputs == "logits"
        add_to_sums(step, logits if averages_logits else log_probabilities.exp())
        teacher = step.broadcast["means"][step.targets]
        if averages_logits:
            teacher = teacher.softmax(1)
        known = step.broadcast["known"][step.targets]
        distillation = -((teacher * log_probabilities).sum(1) * known).mean()
        step.scratch["distillation"]["loss"].add_(distillation.detach())
        return step.task_loss(logits, step.targets) + self.settings.gamma * distillation

    def finish(self, step: Step) -> tuple[State, State]:
        mean_loss = step.scratch["distillation"]["loss"] / step.num_steps
        return {**class_means(step), REPORTED + "distillation_loss": mean_loss}, {}


class FDServer(ServerAlgorithm):
    """The mean outputs per class of every client of the last round, as `client/ID/...`."""

    settings: FDSettings

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        payloads = []
        for other in clients_in(own):
            if other != client or self.settings.average == "all":
                payloads.append({name: own[entry(other, name)] for name in (MEANS, WEIGHTS)})
        if payloads:
            means, known = mean_over_clients(payloads)
        else:
            device = next((tensor.device for tensor in (*own.values(), *state.values())), None)
            classes = self.info.classes
            means = torch.zeros((classes, classes), device=device)
            known = torch.zeros(classes, device=device)
        return {"means": means, "known": known}

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        after = {}
        for update in sorted(updates, key=lambda update: update.client):
            check_payload(update, self.info.classes, self.info.classes)
            for name in (MEANS, WEIGHTS):
                after[entry(update.client, name)] = update.payload[name]
        return after


def entry(client: int, name: str) -> str:
    """Return the name of a client's tensor in the server's state."""
    return f"client/{client}/{name}"


def clients_in(own: State) -> list[int]:
    """Return the clients whose outputs the server has."""
    return sorted({int(name.split("/")[1]) for name in own})


@METHODS.register(
    "fd",
    "models of clients' own, which distill each other's mean outputs per class",
    paper="Jeong et al., NeurIPS 2018 workshop",
)
class FD(Method):
    """No weights are exchanged: only mean outputs, per class."""

    Settings = FDSettings
    Client = FDClient
    Server = FDServer
    requirements = Requirements(
        payload=True,
        own_training=True,
        own_aggregation=True,
        classes=True,
        exchanges_weights=False,
    )
