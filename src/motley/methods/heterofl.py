"""HeteroFL: clients train the leading channels of one model, with three measures against what that does to it.

Diao, Ding and Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients,
ICLR 2021. The parts are those of `split.name = "width"`, and so is the scaler. Here are

- the masked loss: answers for classes of which the client has no example are set to 0 (they still count in the
  softmax, as in the authors' code);
- classifier rows that are averaged over those clients only that have the label (here the client says which);
- static batch norm: clients normalise with their batches, and statistics for evaluation come from a pass over all
  clients' data before each evaluation. A client passes with the size it holds; to have each size evaluated with its
  own statistics, set split.normalization_statistics = "per-size". The authors pass the largest model everywhere and
  evaluate no other.

FedRolex (Alam et al., NeurIPS 2022) is this with rolling channels and no pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from motley.core.merge import Aggregate, apply, merge
from motley.core.part import State, take
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Collection, Method, MethodSettings

if TYPE_CHECKING:
    from motley.engine.learner import Learner


CLASSIFIERS = ("fc", "head", "classify")
"""What the layer is called, in any family, that puts out an answer a class."""


class HeteroFLSettings(MethodSettings):
    """HeteroFL's own settings."""

    name: str = "heterofl"
    masked: bool = True
    """Set the logits of classes that a client does not have to 0 in its loss."""
    classifier_rows: Literal["all", "holders"] = "holders"
    """The clients that count in the average of the last layer's rows. all: all clients. holders: for each class, the
    clients that have examples of it.
    """
    statistics: Literal["pass", "running"] = "pass"
    """Source of batch norm's statistics. pass: a pass over the clients' data before each evaluation. running: the
    running statistics of training.
    """


@METHODS.register(
    "heterofl", "masked loss, classifier rows by label, statistics by a pass", paper="Diao et al., ICLR 2021"
)
class HeteroFL(Method):
    """FedAvg over parts, and this."""

    Settings = HeteroFLSettings
    settings: HeteroFLSettings

    def before_training(self, learner: Learner) -> None:
        learner.note("held", learner.held_classes(self.info.classes))

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        answers = learner.model(images)
        return learner.cross_entropy(answers * learner.notes["held"] if self.settings.masked else answers, labels)

    def payload(self, learner: Learner) -> State:
        return {"held": learner.notes["held"].clone()} if self.settings.classifier_rows == "holders" else {}

    def aggregate(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        if self.settings.classifier_rows == "holders":
            updates = [self._own_rows(update) for update in updates]
        return merge(state, updates)

    def _own_rows(self, update: ClientUpdate) -> ClientUpdate:
        """Return an update in which the rows of classes that its client does not have do not count."""
        held = (update.payload["held"] > 0).float()
        return replace(update, row_weights=dict.fromkeys(self._classifier(update.size), held))

    def _classifier(self, size: str) -> list[str]:
        names = self.info.split.parameters_of(size)
        return [name for name in names if name.rpartition(".")[0].rpartition(".")[2] in CLASSIFIERS]

    # ---- statistics for evaluation

    def collection_clients(self, round_number: int) -> Sequence[int]:
        passes = self.settings.statistics == "pass" and self.info.is_evaluated(round_number)
        return range(len(self.info.sizes)) if passes and self._has_statistics else ()

    @property
    def _has_statistics(self) -> bool:
        return any(name.endswith("running_mean") for name in self.info.split.frame)

    def collect(self, learner: Learner, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Return the mean over batches, by their number of examples, of every batch norm's mean and variance.

        The norms keep it themselves: their running statistics go so far towards a batch as its share of those seen.
        """
        norms = {name: module for name, module in learner.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
        momenta = [norm.momentum for norm in norms.values()]
        kept = {f"{name}.{key}": tensor for name, norm in norms.items() for key, tensor in norm.named_buffers()}
        kept = {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}
        seen = 0
        try:
            with torch.no_grad():
                torch._foreach_zero_(list(kept.values()))
                for images, _ in batches:
                    if len(images) > 1:
                        seen += len(images)
                        for norm in norms.values():
                            norm.momentum = len(images) / seen
                        learner.model(images)
        finally:
            for norm, momentum in zip(norms.values(), momenta, strict=True):
                norm.momentum = momentum
        return {name: tensor.clone() for name, tensor in kept.items()} if seen else {}

    def apply_collection(self, server: State, state: State, collections: Sequence[Collection]) -> tuple[State, State]:
        updates = [self._statistics(state, collection) for collection in collections if collection.values]
        return server, apply(state, merge(state, updates), ())

    def _statistics(self, state: State, collection: Collection) -> ClientUpdate:
        whole = self.info.split.evaluated(collection.size, collection.round_number)
        part = {name: whole[name] for name in collection.values}
        before = take(state, part)
        change = {name: value - before[name] for name, value in collection.values.items()}
        return ClientUpdate(client=collection.client, part=part, delta=change, weight=float(collection.samples))
