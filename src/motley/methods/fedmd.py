"""FedMD: clients with models of their own agree on the logits of public images.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS 2019 workshop.
In every round some public images are drawn (`samples`). A client

    digests    the last round's consensus: it trains on those public images with the mean absolute
               difference between its logits and the consensus as its loss, one epoch by default,
    revisits   its own data: the local steps of the round, on the cross-entropy,
    scores     this round's public images, and sends the logits.

The new consensus is the mean of the clients' logits. No weights are exchanged, so the models may be
unrelated. The order is the paper's: a model is evaluated after it has revisited its own data, and
before it digests the consensus that it contributed to.

- Digesting uses the clients' optimizer with moments of its own, as in the authors' code, and their
  learning rate. The model is in training mode, and public images are not augmented.
- Logits are computed in evaluation mode.
- The paper first trains every model on labelled public data, and then on its private data until it
  converges. Public images have no labels here (`[public]`), so the first is left out. For the
  second, use more local steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.core.async_copy import to_device
from motley.core.part import State
from motley.core.randomness import generator
from motley.core.update import ClientUpdate
from motley.data.public import PublicData
from motley.methods.base import (
    METHODS,
    REPORTED,
    ClientAlgorithm,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.step import Step


class FedMDSettings(MethodSettings):
    """FedMD's own settings."""

    name: str = "fedmd"
    samples: int = Field(default=5000, ge=1)
    """Public images that are drawn in every round; all of them if there are fewer."""
    digest_epochs: int = Field(default=1, ge=0)
    """Epochs over the last round's public images in which a client learns the consensus."""
    digest_batch_size: int = Field(default=256, ge=2)
    """Batch size of these epochs."""


class FedMDClient(ClientAlgorithm):
    """Digest the consensus, train on the client's own data, and score public images."""

    settings: FedMDSettings

    def before_training(self, step: Step) -> None:
        if "logits" not in step.broadcast:
            return  # in the first round there is no consensus yet
        rows, consensus = step.broadcast["rows"], step.broadcast["logits"]
        public = public_of(self.info.public)
        parameters = list(step.params)
        losses = []
        for _ in range(self.settings.digest_epochs):
            for batch in batches_of(len(rows), self.settings.digest_batch_size):
                inputs = step.as_inputs(public.images(rows[batch]))
                loss = F.l1_loss(step.model(inputs).float(), consensus[batch])
                step.backward(loss)
                step.optimize(parameters)
                losses.append(loss.detach())
        if losses:
            step.keep("digest", {"loss": torch.stack(losses).mean()})

    def finish(self, step: Step) -> tuple[State, State]:
        public = public_of(self.info.public)
        drawn = drawn_rows(public, self.settings, self.info.seed, step.round_number)
        rows = to_device(drawn, step.round.device)
        logits = []
        for batch in batches_of(len(rows), self.settings.digest_batch_size):
            inputs = step.as_inputs(public.images(rows[batch]))
            logits.append(step.frozen(step.state, inputs).float())
        payload = {"logits": torch.cat(logits)}
        if "logits" in step.broadcast and self.settings.digest_epochs:
            payload[REPORTED + "digest_loss"] = step.scratch["digest"]["loss"].clone()
        return payload, {}


class FedMDServer(ServerAlgorithm):
    """The consensus: the rows of public images, and the mean of the clients' logits for them."""

    settings: FedMDSettings

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        return own

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        public = public_of(self.info.public)
        round_number = updates[0].round_number
        rows = drawn_rows(public, self.settings, self.info.seed, round_number)
        shape = (len(rows), self.info.classes)
        for update in updates:
            if tuple(update.payload["logits"].shape) != shape:
                given = tuple(update.payload["logits"].shape)
                raise ValueError(f"'logits' has shape {given}, not {shape}")
        ordered = sorted(updates, key=lambda update: update.client)
        consensus = torch.stack([update.payload["logits"] for update in ordered]).mean(0)
        return {"rows": to_device(rows, consensus.device), "logits": consensus}


def drawn_rows(public: PublicData, settings: FedMDSettings, seed: int, round_number: int) -> Tensor:
    """Return the rows of a round's public images. Clients and server draw the same ones."""
    rows = generator(seed, "fedmd", round_number).permutation(len(public))
    return torch.from_numpy(rows[: settings.samples].copy())


def batches_of(count: int, size: int) -> list[slice]:
    """Return the batches of an epoch. A last batch of one image, on which BatchNorm cannot train,
    is part of the batch before it.
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


def public_of(public: PublicData | None) -> PublicData:
    """Return the public images, which a run of this method always has."""
    assert public is not None, "a run of FedMD names its public images"
    return public


@METHODS.register(
    "fedmd",
    "models of clients' own, which agree on the logits of public images",
    paper="Li and Wang, NeurIPS 2019 workshop",
)
class FedMD(Method):
    """No weights are exchanged: only logits of public images."""

    Settings = FedMDSettings
    Client = FedMDClient
    Server = FedMDServer
    requirements = Requirements(
        payload=True,
        own_training=True,
        own_aggregation=True,
        classes=True,
        public_data=True,
        client_public_data=True,
        exchanges_weights=False,
    )
