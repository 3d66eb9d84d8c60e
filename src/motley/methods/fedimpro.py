"""FedImpro: the high level of a model also trains on features drawn from a distribution that all
clients share.

Tang et al., FedImpro: Measuring and Improving Client Update in Federated Learning, ICLR 2024. A
model is cut behind a named stage into a low and a high level (`fedimpro_cut.py`). With h = low(x)
and a normal distribution H of the features h of each class (`fedimpro_statistics.py`) a client
minimizes (Eq. 5)

    cross-entropy(high(h), y) + weight * cross-entropy(high(h'), y'),    h' drawn from H given y'

of which the low level sees the first term only. It estimates H on its own features as it goes
(Eq. 6) and sends its estimate with its delta; the server merges the estimates (Eq. 7), and the next
broadcast brings H.

The released code differs from the paper: each difference is a setting, and `variant` fixes them.
The paper gives no momenta; those here are ours. Its code starts as both variants do: means between
0 and 1 at random, deviations of 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from motley.core.part import State
from motley.core.randomness import torch_seed
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
from motley.methods.fedimpro_cut import Cut
from motley.methods.fedimpro_statistics import Moments, balanced, draw, moments, pooled, repeated
from motley.methods.info import ClientInfo, FederationInfo
from motley.methods.step import Step
from motley.models.stages import Chain, chain_of, run
from motley.settings import Fraction, Limit, allowing

#: Prefix of the method's own tensors in a broadcast, in a payload and in the server's state.
OWN = "features/"
INITIAL_DEVIATION = 0.1
#: In a payload, the mean loss on drawn features over the client's steps, and its weight.
DRAWN_LOSS, WEIGHT = f"{REPORTED}drawn_loss", f"{REPORTED}weight"
#: In the released code a new batch has the weight min(1, d / 5000). Its authors probably meant the
#: number of the batch's examples, but d is the number of values of a feature.
DIMENSION_OF_FULL_WEIGHT = 5000
#: Where the client half keeps its estimate of the statistics, the sum of the loss, and its weight.
SCRATCH = "fedimpro"


Momentum: TypeAlias = Annotated[
    Fraction | Literal["dimension"], allowing('a number from 0 to below 1, or "dimension"')
]


class FedImproSettings(MethodSettings):
    """FedImpro's own settings."""

    #: The defaults of the settings are the paper's.
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "official": {
            "beta_m": "dimension",
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
    """The paper's choices, or those of its released code (official). The other keys override the
    variant's values.
    """
    cut: str = ""
    """The last stage of the low level, for example layer2; empty: the one in the middle, which is
    layer2 of a ResNet.
    """
    beta_m: Momentum = 0.9
    """Momentum of a client's statistics over its batches (Eq. 6). 0: only the last batch with a
    class counts. dimension: 1 - min(1, d / 5000) with d values per feature, as in the released
    code. That is 0 behind layers 1 to 3 of a ResNet, but 0.8976 behind its pooling (d = 512).
    """
    beta_g: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the server's statistics over rounds (Eq. 7)."""
    merge: Literal["uniform", "counts"] = "uniform"
    """uniform: the mean over clients; a client without a class returns the statistics it received
    (Eq. 7). counts: the statistics of all clients' examples together, each class over the clients
    that have it.
    """
    share: Literal["shape", "size"] = "shape"
    """shape: sizes whose features have the same shape share their statistics. size: each size has
    its own.
    """
    spread: Literal["variance", "deviation"] = "variance"
    """The quantity that is averaged beside the mean."""
    deviation_max: Limit = "off"
    """Maximum standard deviation of drawn features."""
    noise: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise on means and variances that a client sends."""
    source: Literal["received", "own"] = "received"
    """received: features are drawn from the received statistics. own: from the client's own
    estimate, which starts from them.
    """
    labels: Literal["batch", "balanced"] = "batch"
    """batch: features are drawn for the labels of the batch. balanced: for every class equally
    often.
    """
    ratio: float = Field(default=1.0, gt=0)
    """Number of drawn features per example of the batch. With labels = "balanced", the next larger
    multiple of the number of classes, as in the released code: 130 for a batch of 128 and 10
    classes, and 140 for one of 130.
    """
    normalization: Literal["joint", "separate"] = "joint"
    """joint: real and drawn features are one batch for batch norm. separate: two batches, and only
    the real one updates the running statistics.
    """
    weight: float = Field(default=1.0, ge=0)
    """Weight of the loss on drawn features; 0: nothing is drawn."""
    ramp: float = Field(default=0.0, ge=0)
    """Warm-up length in epochs: the weight rises linearly from 0 to `weight` and keeps rising. 0:
    the weight is constant.
    """
    weight_max: Limit = "off"
    """Maximum weight that a ramp reaches."""
    average: bool = False
    """Divide the loss by 1 + weight. With weight = ratio it is then the mean over real and drawn
    features (Theorem 4.2).
    """

    def momentum(self, dimension: int) -> float:
        """Return the momentum of a client's statistics of features with so many values."""
        if self.beta_m == "dimension":
            return 1 - min(1.0, dimension / DIMENSION_OF_FULL_WEIGHT)
        return self.beta_m

    def weight_at(self, epoch: float) -> float:
        """Return the weight of the drawn features' loss after so many epochs."""
        weight = self.weight * epoch / self.ramp if self.ramp else self.weight
        return weight if self.weight_max == "off" else min(weight, self.weight_max)


class FedImproClient(ClientAlgorithm):
    """FedAvg, and a loss on drawn features. Every hook calls the next class's, see
    `fedimpro_combinations.py`.
    """

    settings: FedImproSettings

    def __init__(self, settings: MethodSettings, info: ClientInfo) -> None:
        super().__init__(settings, info)
        self.cut = Cut(info.split, info.input_shape, self.settings.cut)

    def before_training(self, step: Step) -> None:
        super().before_training(step)
        epoch = (step.round_number - 1) * self.info.training.epochs
        step.keep(
            SCRATCH,
            {
                "weight": torch.tensor(self.settings.weight_at(epoch)),
                "drawn_loss": torch.zeros(()),
                "counts": torch.zeros(self.info.classes),
                "mean": step.broadcast[f"{OWN}mean"],
                "spread": step.broadcast[f"{OWN}spread"],
            },
        )

    def loss(self, step: Step) -> Tensor:
        low, high = self.cut.levels(chain_of(step.model), step.size)
        features = run(low, step.inputs)
        if self.settings.weight:
            loss = self._loss_with_drawn(step, high, features)
        else:
            loss = step.task_loss(run(high, features), step.targets)
        self.observe(step, features.detach().flatten(1).float(), step.targets)
        return loss

    def _loss_with_drawn(self, step: Step, high: Chain, features: Tensor) -> Tensor:
        drawn_targets = self.drawn_targets(step.targets)
        drawn_features = self.drawn_features(step, drawn_targets, features)
        logits, drawn_logits = self._logits(step, high, features, drawn_features)
        weight = step.scratch[SCRATCH]["weight"]
        drawn_loss = step.task_loss(drawn_logits, drawn_targets)
        step.scratch[SCRATCH]["drawn_loss"].add_(drawn_loss.detach())
        loss = step.task_loss(logits, step.targets) + weight * drawn_loss
        return loss / (1 + weight) if self.settings.average else loss

    def drawn_targets(self, targets: Tensor) -> Tensor:
        """Return y', the labels for which features are drawn."""
        count = max(1, round(self.settings.ratio * len(targets)))
        if self.settings.labels == "balanced":
            return balanced(targets, self.info.classes, count)
        return repeated(targets, count)

    def drawn_features(self, step: Step, targets: Tensor, features: Tensor) -> Tensor:
        """Draw h' for labels, in the shape and memory layout of a batch's own features."""
        if self.settings.source == "own":
            mean, spread = step.scratch[SCRATCH]["mean"], step.scratch[SCRATCH]["spread"]
        else:
            mean, spread = step.broadcast[f"{OWN}mean"], step.broadcast[f"{OWN}spread"]
        spread = spread.clamp_min(0)
        deviation = spread.sqrt() if self.settings.spread == "variance" else spread
        drawn = draw(mean, deviation, targets)
        drawn = drawn.view(-1, *features.shape[1:]).to(features.dtype)
        if features.dim() == 4 and features.is_contiguous(memory_format=torch.channels_last):
            drawn = drawn.contiguous(memory_format=torch.channels_last)
        return drawn

    def _logits(
        self, step: Step, high: Chain, features: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.settings.normalization == "joint":
            logits = run(high, torch.cat([features, drawn]))
            return logits[: len(features)], logits[len(features) :]
        logits = run(high, features)
        with step.preserve_buffers():
            return logits, run(high, drawn)

    @torch.no_grad()
    def observe(self, step: Step, features: Tensor, targets: Tensor) -> None:
        """Let the client's statistics follow a batch (Eq. 6). A deviation takes two examples of a
        class.
        """
        own = step.scratch[SCRATCH]
        batch = moments(features, targets, self.info.classes)
        spread = batch.variance if self.settings.spread == "variance" else batch.variance.sqrt()
        pull = 1 - self.settings.momentum(features.shape[1])
        own["mean"].lerp_(batch.mean, pull * (batch.counts > 0).float()[:, None])
        own["spread"].lerp_(spread, pull * (batch.counts > 1).float()[:, None])
        if self.settings.deviation_max != "off":
            # The released code limits the estimate, not the batch's deviation.
            own["spread"].clamp_max_(spread_of(self.settings.deviation_max, self.settings))
        own["counts"].add_(batch.counts)

    def finish(self, step: Step) -> tuple[State, State]:
        payload, client_state = super().finish(step)
        own = step.scratch[SCRATCH]
        for name in ("mean", "spread"):
            tensor = own[name].clone()
            if self.settings.noise:
                tensor = tensor + self.settings.noise * torch.randn_like(tensor)
            payload[f"{OWN}{name}"] = tensor
        if self.settings.merge == "counts":
            payload[f"{OWN}counts"] = own["counts"].clone()
        if self.settings.weight:
            payload[DRAWN_LOSS] = own["drawn_loss"] / max(step.num_steps, 1)
            payload[WEIGHT] = own["weight"].clone()
        return payload, client_state


class FedImproServer(ServerAlgorithm):
    """FedAvg, and the statistics of all clients' features. Every hook calls the next class's."""

    settings: FedImproSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        self.cut = Cut(info.split, info.input_shape, self.settings.cut)
        #: The statistics that each size uses.
        self._groups: dict[str, str] = {}
        for size in info.split.sizes:
            self._groups[size] = self.cut.group(size) if self.settings.share == "shape" else size

    def init(self) -> State:
        own = super().init()
        for size, group in self._groups.items():
            shape = (self.info.classes, self.cut.shapes[size].numel())
            with torch_seed(self.info.seed, "features", group):
                own[f"{OWN}{group}/mean"] = torch.rand(shape)
            deviation = spread_of(INITIAL_DEVIATION, self.settings)
            own[f"{OWN}{group}/spread"] = torch.full(shape, deviation)
        return own

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        broadcast = dict(super().broadcast(own, state, round_number, client))
        group = self._groups[self.info.size_of(client, round_number)]
        for name in ("mean", "spread"):
            broadcast[f"{OWN}{name}"] = own[f"{OWN}{group}/{name}"]
        return broadcast

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        statistics = {name: tensor for name, tensor in own.items() if name.startswith(OWN)}
        for group in dict.fromkeys(self._groups[update.size] for update in updates):
            payloads = self._payloads(updates, group)
            for name, (value, known) in self._merged(payloads).items():
                before = statistics[f"{OWN}{group}/{name}"]
                change = (1 - self.settings.beta_g) * known * (value - before)
                statistics[f"{OWN}{group}/{name}"] = before + change
        others = [replace(update, payload=_without_own(update.payload)) for update in updates]
        return {**super().update(_without_own(own), state, others), **statistics}

    def metrics(self, own: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return the loss on drawn features and its weight, the deviation they are drawn with, and
        how far apart the clients' means are, both as root mean squares over classes and values.
        """
        spreads = []
        for name, tensor in own.items():
            if name.startswith(OWN) and name.endswith("/spread"):
                spreads.append(tensor.flatten())
        spread = torch.cat(spreads)
        is_variance = self.settings.spread == "variance"
        variance = spread.clamp_min(0) if is_variance else spread.square()
        apart = []
        for group in dict.fromkeys(self._groups[update.size] for update in updates):
            means = [payload[f"{OWN}mean"] for payload in self._payloads(updates, group)]
            apart.append(torch.stack(means).var(0, correction=0).flatten())
        return {
            **super().metrics(own, updates),
            "deviation": variance.mean().sqrt(),
            "means_apart": torch.cat(apart).mean().sqrt(),
        }

    def _payloads(self, updates: Sequence[ClientUpdate], group: str) -> list[State]:
        """Return the payloads of the clients whose sizes share the statistics of a group."""
        return [update.payload for update in updates if self._groups[update.size] == group]

    def _merged(self, payloads: Sequence[State]) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Return the statistics of several clients together, each with 1 for the classes of which
        it is known, and 0 for the others.
        """
        mean = torch.stack([payload[f"{OWN}mean"] for payload in payloads])
        spread = torch.stack([payload[f"{OWN}spread"] for payload in payloads])
        if self.settings.merge == "uniform":
            return {"mean": (mean.mean(0), 1.0), "spread": (spread.mean(0), 1.0)}
        is_variance = self.settings.spread == "variance"
        variance = spread if is_variance else spread.square()
        counts = [payload[f"{OWN}counts"] for payload in payloads]
        moments_of_clients = []
        for client_moments in zip(counts, mean, variance, strict=True):
            moments_of_clients.append(Moments(*client_moments))
        whole = pooled(moments_of_clients)
        merged_spread = whole.variance if is_variance else whole.variance.sqrt()
        counted = whole.counts[:, None]
        return {
            "mean": (whole.mean, (counted > 0).float()),
            "spread": (merged_spread, (counted > 1).float()),
        }


@METHODS.register(
    "fedimpro",
    "the high level trains on shared feature distributions",
    paper="Tang et al., ICLR 2024",
)
class FedImpro(Method):
    """FedAvg, with features drawn from shared statistics."""

    Settings = FedImproSettings
    Client = FedImproClient
    Server = FedImproServer
    requirements = Requirements(
        payload=True, own_training=True, own_aggregation=True, stages=True, classes=True
    )


def spread_of(deviation: float, settings: FedImproSettings) -> float:
    """Return a standard deviation as the quantity that is averaged (`spread`)."""
    return deviation**2 if settings.spread == "variance" else deviation


def _without_own(state: State) -> State:
    prefixes = (OWN, REPORTED)
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}
