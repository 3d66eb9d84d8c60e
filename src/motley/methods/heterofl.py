"""HeteroFL: clients train the leading channels of one model, with three corrections for that.

Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients, ICLR 2021. The parts are those of `split.name = "width"`, and so is the
scaler. The three corrections here are

- the masked loss: logits of classes of which the client has no example are set to 0 (they still
  count in the softmax, as in the authors' code);
- classifier rows that are averaged only over the clients that have the label (the client says which
  labels it has);
- static batch norm: clients normalize with their batches, and the statistics for evaluation come
  from a pass over all clients' data before each evaluation. A client passes its data through a
  model of its own size; to evaluate each size with its own statistics, set
  split.normalization_statistics = "per-size". The authors pass the largest model everywhere and
  evaluate no other.

FedRolex (Alam et al., NeurIPS 2022) is this with rolling channels and no pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from motley.core.merge import Aggregate, apply, merge
from motley.core.part import State, take
from motley.core.update import ClientUpdate
from motley.methods.base import (
    METHODS,
    ClientAlgorithm,
    Collection,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.step import Step
from motley.models.facts import classifiers_of


class HeteroFLSettings(MethodSettings):
    """HeteroFL's own settings."""

    name: str = "heterofl"
    masked: bool = True
    """Set the logits of classes that a client does not have to 0 in its loss."""
    classifier_rows: Literal["all", "holders"] = "holders"
    """The clients that count in the average of the last layer's rows. all: all clients. holders:
    for each class, the clients that have examples of it.
    """
    statistics: Literal["pass", "running"] = "pass"
    """Source of batch norm's statistics. pass: a pass over the clients' data before each
    evaluation. running: the running statistics of training.
    """


class HeteroFLClient(ClientAlgorithm):
    """FedAvg with a masked loss, and a pass for batch norm's statistics."""

    settings: HeteroFLSettings

    def before_training(self, step: Step) -> None:
        has_class = step.class_counts(self.info.classes) > 0
        step.keep("classes", {"present": has_class.float()})

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs)
        if self.settings.masked:
            logits = logits * step.scratch["classes"]["present"]
        return step.task_loss(logits, step.targets)

    def finish(self, step: Step) -> tuple[State, State]:
        if self.settings.classifier_rows == "all":
            return {}, {}
        return {"held": step.scratch["classes"]["present"].clone()}, {}

    def collect(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Return the mean over batches, weighted by their length, of every batch norm's mean and
        variance.

        The norms compute it themselves: with a momentum of n / (examples so far) for a batch of n
        examples, running statistics are the mean over all batches.
        """
        norms = {}
        statistics = {}
        for name, module in step.model.named_modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                norms[name] = module
                for key, buffer in module.named_buffers():
                    if buffer.is_floating_point():
                        statistics[f"{name}.{key}"] = buffer
        momenta = [norm.momentum for norm in norms.values()]
        seen = 0
        try:
            with torch.no_grad():
                for tensor in statistics.values():
                    tensor.zero_()
                for images, _ in batches:
                    if len(images) > 1:
                        seen += len(images)
                        for norm in norms.values():
                            norm.momentum = len(images) / seen
                        step.model(images)
        finally:
            for norm, momentum in zip(norms.values(), momenta, strict=True):
                norm.momentum = momentum
        return {name: tensor.clone() for name, tensor in statistics.items()} if seen else {}


class HeteroFLServer(ServerAlgorithm):
    """FedAvg over the holders of a class in the classifier, and pooled statistics."""

    settings: HeteroFLSettings

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        if self.settings.classifier_rows == "holders":
            updates = [self._with_row_weights(update) for update in updates]
        return merge(state, updates)

    def _with_row_weights(self, update: ClientUpdate) -> ClientUpdate:
        """Return an update in which the classifier's rows of classes that its client does not have
        do not count.
        """
        present = (update.payload["held"] > 0).float()
        return replace(update, row_weights=dict.fromkeys(self._classifier(update.size), present))

    def _classifier(self, size: str) -> list[str]:
        """Return the parameters of the layers that output one number per class."""
        split = self.info.split
        layers = classifiers_of(split.blueprints[size].module)
        return [name for name in split.parameters_of(size) if name.rpartition(".")[0] in layers]

    def collection_clients(self, round_number: int) -> Sequence[int]:
        if self.settings.statistics != "pass" or not self.info.is_evaluated(round_number):
            return ()
        has_statistics = any(name.endswith("running_mean") for name in self.info.split.meta_state)
        return range(len(self.info.sizes)) if has_statistics else ()

    def apply_collection(
        self, own: State, state: State, collections: Sequence[Collection]
    ) -> tuple[State, State]:
        answers = [collection for collection in collections if collection.values]
        updates = [self._statistics(state, answer) for answer in answers]
        return own, apply(state, merge(state, updates), ())

    def _statistics(self, state: State, collection: Collection) -> ClientUpdate:
        whole = self.info.split.evaluated(collection.size, collection.round_number)
        part = {name: whole[name] for name in collection.values}
        before = take(state, part)
        delta = {name: value - before[name] for name, value in collection.values.items()}
        weight = float(collection.samples)
        return ClientUpdate(client=collection.client, part=part, delta=delta, weight=weight)


@METHODS.register(
    "heterofl",
    "masked loss, classifier rows by label, statistics by a pass",
    paper="Diao et al., ICLR 2021",
)
class HeteroFL(Method):
    """FedAvg over parts, with these two halves."""

    Settings = HeteroFLSettings
    Client = HeteroFLClient
    Server = HeteroFLServer
    requirements = Requirements(
        payload=True, own_training=True, own_aggregation=True, collection=True, classes=True
    )
