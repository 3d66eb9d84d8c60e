"""FedImpro: the high level of a model also trains on features drawn from a distribution that all clients share.

Tang et al., FedImpro: Measuring and Improving Client Update in Federated Learning, ICLR 2024. A model is cut behind a
named stage into a low and a high level (`levels.py`). With h = low(x) and a normal distribution H of the h of each
class (`class_statistics.py`) a client minimises (Eq. 5)

    cross entropy(high(h), y) + weight * cross entropy(high(h'), y'),    h' drawn from H given y'

of which the low level sees the first term only. It estimates H on its own features as it goes (Eq. 6) and sends its
estimate with its change; the server merges the estimates (Eq. 7), and the next message brings H.

The released code differs from the paper: each difference is a setting, and `variant` fixes them. The paper gives no
momenta; those here are ours. Its code starts as both variants do: means between 0 and 1 at random, deviations of 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from motley.core.part import State
from motley.core.randomness import torch_seed
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, REPORTED, FederationInfo, Method, MethodSettings
from motley.methods.class_statistics import Moments, balanced, draw, moments, pooled, repeated
from motley.methods.levels import Levels
from motley.models.stages import Chain, chain_of, run
from motley.settings import Limit

if TYPE_CHECKING:
    from motley.engine.learner import Learner

OWN = "features/"
"""What the names of the method's own tensors begin with, wherever they are."""
INITIAL_DEVIATION = 0.1
DRAWN_LOSS, WEIGHT = f"{REPORTED}drawn_loss", f"{REPORTED}weight"
"""The mean loss on drawn features over a turn's steps (while it lasts, the sum), and its weight."""


class FedImproSettings(MethodSettings):
    """FedImpro's own settings."""

    #: The fields' defaults are the paper's.
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "official": {
            "beta_m": 0.0,
            "beta_g": 0.0,
            "spread": "deviation",
            "deviation_max": 0.1,
            "labels": "balanced",
            "source": "own",
            "ramp": 500.0,
        },
    }

    name: str = "fedimpro"
    variant: Literal["paper", "official"] = "paper"
    """The paper's choices, or those of its released code (official). The other keys override the variant's values."""
    cut: str = ""
    """The last stage of the low level, for example layer2; empty: the one in the middle, which is layer2 of a ResNet.
    """
    beta_m: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of a client's statistics over its batches (Eq. 6). 0: only the last batch with a class counts."""
    beta_g: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the server's statistics over rounds (Eq. 7)."""
    merge: Literal["uniform", "counts"] = "uniform"
    """uniform: the mean over clients; a client without a class returns the statistics it received (Eq. 7). counts: the
    statistics of all clients' examples together, each class over the clients that have it.
    """
    share: Literal["shape", "size"] = "shape"
    """shape: sizes whose features have the same shape share their statistics. size: each size has its own."""
    spread: Literal["variance", "deviation"] = "variance"
    """The quantity that is averaged beside the mean."""
    deviation_max: Limit = "off"
    """Maximum standard deviation of drawn features."""
    noise: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise on means and variances that a client sends."""
    source: Literal["received", "own"] = "received"
    """received: features are drawn from the received statistics. own: from the client's own estimate, which starts
    from them.
    """
    labels: Literal["batch", "balanced"] = "batch"
    """batch: features are drawn for the labels of the batch. balanced: for every class equally often."""
    ratio: float = Field(default=1.0, gt=0)
    """Number of drawn features per example of the batch. With labels = "balanced", rounded up to a multiple of the
    number of classes.
    """
    normalization: Literal["joint", "separate"] = "joint"
    """joint: real and drawn features are one batch for batch norm. separate: two batches, and only the real one
    updates the running statistics.
    """
    weight: float = Field(default=1.0, ge=0)
    """Weight of the loss on drawn features; 0: nothing is drawn."""
    ramp: float = Field(default=0.0, ge=0)
    """Warm-up length in epochs: the weight rises linearly from 0 to `weight` and keeps rising. 0: the weight is
    constant.
    """
    weight_max: Limit = "off"
    """Maximum weight that a ramp reaches."""
    average: bool = False
    """Divide the loss by 1 + weight. With weight = ratio it is then the mean over real and drawn features (Theorem
    4.2).
    """

    def weight_at(self, epoch: float) -> float:
        """Return the weight of the drawn features' loss after so many epochs."""
        weight = self.weight * epoch / self.ramp if self.ramp else self.weight
        return weight if self.weight_max == "off" else min(weight, self.weight_max)


@METHODS.register("fedimpro", "the high level trains on shared feature distributions", paper="Tang et al., ICLR 2024")
class FedImpro(Method):
    """FedAvg, and this loss. Other methods' hooks are called first, so that it can stand before any of them."""

    Settings = FedImproSettings
    settings: FedImproSettings

    def __init__(self, settings: MethodSettings, world: FederationInfo) -> None:
        super().__init__(settings, world)
        self._levels = Levels(world, self.settings.cut)
        common = self.settings.share == "shape"
        self._groups = {size: self._levels.group(size) if common else size for size in world.split.sizes}
        """Which statistics a size uses."""

    # ---- server

    def init(self) -> State:
        own: State = {}
        for size, group in self._groups.items():
            shape = (self.info.classes, self._levels.shapes[size].numel())
            with torch_seed(self.info.seed, "features", group):
                own[f"{OWN}{group}/mean"] = torch.rand(shape)
            own[f"{OWN}{group}/spread"] = torch.full(shape, self._spread(INITIAL_DEVIATION))
        return {**super().init(), **own}

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        group = self._groups[self.info.size_of(client, round_number)]
        own = {f"{OWN}{name}": server[f"{OWN}{group}/{name}"] for name in ("mean", "spread")}
        return {**super().broadcast(server, state, round_number, client), **own}

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        own = {name: tensor for name, tensor in server.items() if name.startswith(OWN)}
        for group in dict.fromkeys(self._groups[update.size] for update in updates):
            given = [update.payload for update in updates if self._groups[update.size] == group]
            for name, (value, known) in self._merged(given).items():
                held = own[f"{OWN}{group}/{name}"]
                own[f"{OWN}{group}/{name}"] = held + (1 - self.settings.beta_g) * known * (value - held)
        others = [replace(update, payload=_without_own(update.payload)) for update in updates]
        return {**super().update(_without_own(server), state, others), **own}

    def metrics(self, server: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return the drawn features' loss and weight, the deviation they are drawn with, and how far apart the means
        are that clients sent: both as root mean squares over classes and values.
        """
        held = torch.cat([t.flatten() for n, t in server.items() if n.startswith(OWN) and n.endswith("/spread")])
        variance = held.clamp_min(0) if self.settings.spread == "variance" else held.square()
        apart = []
        for group in dict.fromkeys(self._groups[update.size] for update in updates):
            means = [u.payload[f"{OWN}mean"] for u in updates if self._groups[u.size] == group]
            apart.append(torch.stack(means).var(0, correction=0).flatten())
        own = {"deviation": variance.mean().sqrt(), "means_apart": torch.cat(apart).mean().sqrt()}
        return {**super().metrics(server, updates), **own}

    def _merged(self, given: Sequence[State]) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the clients' statistics together, each with 1 for the classes of which it is known, and 0."""
        sent = {name: torch.stack([message[f"{OWN}{name}"] for message in given]) for name in ("mean", "spread")}
        if self.settings.merge == "uniform":
            return {name: (tensor.mean(0), 1.0) for name, tensor in sent.items()}
        variance = sent["spread"] if self.settings.spread == "variance" else sent["spread"].square()
        counts = [message[f"{OWN}counts"] for message in given]
        whole = pooled([Moments(*part) for part in zip(counts, sent["mean"], variance, strict=True)])
        spread = whole.variance if self.settings.spread == "variance" else whole.variance.sqrt()
        counted = whole.counts[:, None]
        return {"mean": (whole.mean, (counted > 0).float()), "spread": (spread, (counted > 1).float())}

    # ---- client

    def before_training(self, learner: Learner) -> None:
        super().before_training(learner)
        assert learner.job is not None
        epoch = (learner.job.round_number - 1) * learner.training.epochs
        learner.note(WEIGHT, torch.tensor(self.settings.weight_at(epoch)))
        learner.note(DRAWN_LOSS, torch.zeros(()))
        learner.note(f"{OWN}counts", torch.zeros(self.info.classes))
        for name in ("mean", "spread"):
            learner.note(f"{OWN}{name}", learner.message[f"{OWN}{name}"])

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        assert learner.job is not None
        low, high = self._levels.of(chain_of(learner.model), learner.job.size)
        features = run(low, images)
        if self.settings.weight:
            drawn_labels = self._drawn_labels(labels)
            real, drawn = self._answers(learner, high, features, self._drawn(learner, drawn_labels, features))
            weight, drawn_loss = learner.notes[WEIGHT], learner.cross_entropy(drawn, drawn_labels)
            learner.notes[DRAWN_LOSS].add_(drawn_loss.detach())
            loss = learner.cross_entropy(real, labels) + weight * drawn_loss
            loss = loss / (1 + weight) if self.settings.average else loss
        else:
            loss = learner.cross_entropy(run(high, features), labels)
        self._observe(learner, features.detach().flatten(1).float(), labels)
        return loss

    def payload(self, learner: Learner) -> State:
        own = {name: learner.notes[f"{OWN}{name}"].clone() for name in ("mean", "spread")}
        if self.settings.noise:
            own = {name: tensor + self.settings.noise * torch.randn_like(tensor) for name, tensor in own.items()}
        if self.settings.merge == "counts":
            own["counts"] = learner.notes[f"{OWN}counts"].clone()
        sent = {f"{OWN}{name}": tensor for name, tensor in own.items()}
        if self.settings.weight:
            sent[DRAWN_LOSS] = learner.notes[DRAWN_LOSS] / max(learner.taken, 1)
            sent[WEIGHT] = learner.notes[WEIGHT].clone()
        return {**super().payload(learner), **sent}

    # ---- what the loss is made of

    def _drawn_labels(self, labels: Tensor) -> Tensor:
        count = max(1, round(self.settings.ratio * len(labels)))
        if self.settings.labels == "balanced":
            return balanced(labels, self.info.classes, count)
        return repeated(labels, count)

    def _drawn(self, learner: Learner, labels: Tensor, features: Tensor) -> Tensor:
        """Return features for labels, laid out as a batch's own."""
        held = learner.notes if self.settings.source == "own" else learner.message
        spread = held[f"{OWN}spread"].clamp_min(0)
        deviation = spread.sqrt() if self.settings.spread == "variance" else spread
        drawn = draw(held[f"{OWN}mean"], deviation, labels).view(-1, *features.shape[1:]).to(features.dtype)
        last = features.dim() == 4 and features.is_contiguous(memory_format=torch.channels_last)
        return drawn.contiguous(memory_format=torch.channels_last) if last else drawn

    def _answers(self, learner: Learner, high: Chain, features: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        if self.settings.normalization == "joint":
            answers = run(high, torch.cat([features, drawn]))
            return answers[: len(features)], answers[len(features) :]
        real = run(high, features)
        with learner.same_buffers():
            return real, run(high, drawn)

    @torch.no_grad()
    def _observe(self, learner: Learner, features: Tensor, labels: Tensor) -> None:
        """Let the client's statistics follow a batch (Eq. 6), in place; a deviation takes two examples of a class."""
        mean, spread, counts = (learner.notes[f"{OWN}{name}"] for name in ("mean", "spread", "counts"))
        batch = moments(features, labels, self.info.classes)
        new = batch.variance if self.settings.spread == "variance" else batch.variance.sqrt()
        if self.settings.deviation_max != "off":
            new = new.clamp_max(self._spread(self.settings.deviation_max))
        pull = 1 - self.settings.beta_m
        mean.lerp_(batch.mean, pull * (batch.counts > 0).float()[:, None])
        spread.lerp_(new, pull * (batch.counts > 1).float()[:, None])
        counts.add_(batch.counts)

    def _spread(self, deviation: float) -> float:
        return deviation**2 if self.settings.spread == "variance" else deviation


def _without_own(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith((OWN, REPORTED))}
