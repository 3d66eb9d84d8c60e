"""FedIN: intermediate layers learn from other clients' features.

Chan et al., FedIN: Federated Intermediate Layers Learning for Model Heterogeneity, submitted to
TMLR. A model is an extractor, intermediate layers and a classifier: the first stage of its chain,
those between, and the head. With its part a client receives (s_in, s_out), the inputs and outputs
of other clients' intermediate layers on one batch, and steps on

    L_local = cross-entropy + mu / 2 |w - w_received|^2        all layers
    L_IN = mean squared error(intermediate(s_in), s_out)       intermediate layers only

whose gradients are combined in the intermediate layers (`combine`). Then it sends the features of a
batch of its own. The server keeps each client's newest features and never returns them to it. The
first round has none and is FedProx's.

The paper leaves some things open. Here the proximal gradient is part of G_local, Eq. 12 holds for
each tensor by itself, and features are computed in training mode, as the intermediate layers of
other clients will see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator, torch_seed
from motley.core.tensors import copy_, norms
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
from motley.methods.fedin_pool import IN, OUT, Shapes, collect, draw, entries
from motley.methods.info import FederationInfo
from motley.methods.step import Proximal, Step
from motley.models import InputShape
from motley.models.stages import chain_of, owned, run, shape_behind
from motley.splits.base import Split

#: The mean of L_IN over a client's steps, in its payload.
IN_LOSS = f"{REPORTED}in_loss"
#: Where the algorithm keeps the sum of L_IN, and the projection of each end.
SCRATCH = "fedin"


class FedInSettings(MethodSettings):
    """FedIN's own settings."""

    name: str = "fedin"
    mu: float = Field(default=0.1, ge=0)
    """Weight of the proximal term; the paper writes mu / 2 = 0.05. 0 is its ablation "w/o Prox"."""
    proximal: Proximal = "squared"
    """The proximal term, as for FedProx. squared: mu/2 |theta - w|^2. norms: mu/2 times the sum of
    |theta - w| over tensors. norm-of-squares: mu/2 times the sum of |(theta - w)^2|.
    """
    combine: Literal["simplified", "exact", "sum"] = "simplified"
    """How the gradients are combined. simplified: G_IN + multiplier / 2 G_local (Eq. 13). exact:
    G_IN without its component against G_local, and without G_local itself (Eq. 12). sum: G_IN +
    G_local, the ablation "w/o Opt".
    """
    multiplier: float = Field(default=1.0, gt=0)
    """Lambda of Eq. 13."""
    step: Literal["joint", "separate"] = "joint"
    """joint: one step with the combined gradient. separate: FedProx's step, then a step on L_IN
    with an optimiser of its own.
    """
    samples: int = Field(default=1, ge=0)
    """Number of other clients whose features a client receives (Figure 6d). 0: none, the ablation
    "w/o IN".
    """
    batch: int = Field(default=0, ge=0)
    """Number of examples in a client's features; 0: the training batch size."""
    pool: int = Field(default=100, ge=1)
    """Maximum number of clients whose features the server keeps; the most recent ones stay."""
    stale: bool = True
    """Keep features of rounds before the last one."""
    noise: float = Field(default=0.0, ge=0)
    """Noise on s_in and s_out, as a multiple of their standard deviations; 0.8 in the paper's
    "+Noise".
    """
    noise_deviation: Literal["tensor", "coordinate"] = "tensor"
    """The standard deviation that the noise is a multiple of. tensor: one for all values of a
    batch's features. coordinate: one for every value, over the examples of the batch.
    """
    noise_on: Literal["forward", "upload"] = "forward"
    """forward: noise throughout training, and so on sent features too. upload: noise on sent
    features only.
    """
    running: Literal["both", "local"] = "both"
    """Passes that update the running statistics of normalisation. both: also those on received
    features. local: only those on the client's own examples.
    """
    projection: int = Field(default=0, ge=0)
    """Length of the vectors to which features are projected, so that models of different widths and
    families can exchange them. 0: no projection; features go to models in which they have the same
    shape.
    """

    @model_validator(mode="after")
    def _separate_steps_combine_nothing(self) -> FedInSettings:
        if self.step == "separate" and self.combine != "simplified":
            raise ValueError(
                f"combine = {self.combine!r} is for step = 'joint'; separate steps combine no "
                "gradients"
            )
        return self


class FedINClient(ClientAlgorithm):
    """FedProx, and a second loss for the intermediate layers: one more pass through them."""

    settings: FedInSettings

    @cached_property
    def _shapes(self) -> dict[str, Shapes]:
        return feature_shapes(self.info.split, self.info.input_shape)

    def before_training(self, step: Step) -> None:
        step.keep(SCRATCH, {"loss": torch.zeros(())})
        if self.settings.projection and IN not in step.scratch[SCRATCH]:
            # Features of one length: a fixed random projection for each shape, and back by its
            # transpose.
            for end, shape in zip((IN, OUT), self._shapes[step.size], strict=True):
                matrix = torch.empty(self.settings.projection, shape.numel())
                with torch_seed(self.info.seed, "projection", end, shape.numel()):
                    step.keep(SCRATCH, {end: nn.init.orthogonal_(matrix)})

    def loss(self, step: Step) -> Tensor:
        _, s_out = self.features(step.model, step.inputs)
        return step.task_loss(run(chain_of(step.model)[-1:], s_out), step.targets)

    def train_step(self, step: Step) -> Tensor:
        if not step.broadcast or self.settings.step == "separate":
            return self._local_step(step)
        exact = self.settings.combine == "exact"
        loss = self._backward_projected(step) if exact else self._backward_together(step)
        self.descend(step)
        return loss.detach()

    def _local_step(self, step: Step) -> Tensor:
        """Take FedProx's step, and if there are features, a step on L_IN after it."""
        loss = self.loss(step)
        step.backward(loss)
        step.proximal(self.settings.mu, term=self.settings.proximal)
        self.descend(step)
        if step.broadcast:
            self._inner_backward(step)
            step.optimize(intermediate(step.model))
        return loss.detach()

    def _backward_together(self, step: Step) -> Tensor:
        """Leave G_IN + weight G_local in the intermediate layers, and G_local elsewhere.

        One backward pass computes both. The gradient that comes from the head is weighted before it
        enters the intermediate layers, and weighted back when it leaves them for the extractor.
        Return L_local without its proximal term.
        """
        weight = self.settings.multiplier / 2 if self.settings.combine == "simplified" else 1.0
        extractor, *between, head = chain_of(step.model)
        s_in = weighted(self._noisy(extractor.run(step.inputs), "forward"), 1 / weight)
        # Received features go first, so they update running statistics before the client's batch.
        inner = self.inner_loss(step)
        s_out = self._noisy(run(between, s_in), "forward")
        loss = step.task_loss(head.run(weighted(s_out, weight)), step.targets)
        step.scratch[SCRATCH]["loss"].add_(inner.detach())
        step.backward(loss + inner)
        inside = set(intermediate(step.model))
        mu = {name: self.settings.mu * (weight if name in inside else 1) for name in step.params}
        step.proximal(mu, term=self.settings.proximal)
        return loss

    def _backward_projected(self, step: Step) -> Tensor:
        """Leave Eq. 12's gradient in the intermediate layers, and G_local elsewhere.

        Eq. 12 needs both gradients by themselves, so there are two backward passes.
        """
        self._inner_backward(step)
        inner = {name: grad.clone() for name, grad in step.grads.items()}
        loss = self.loss(step)
        step.backward(loss)
        step.proximal(self.settings.mu, term=self.settings.proximal)
        local = {name: grad for name, grad in step.grads.items() if name in inner}
        copy_(local, projected(inner, local))
        return loss

    @torch.no_grad()
    def finish(self, step: Step) -> tuple[State, State]:
        if not self.settings.samples:
            return {}, {}
        inputs = step.first_inputs(self.settings.batch or self.info.training.batch_size)
        s_in, s_out = self.features(step.model, inputs)
        payload = {
            IN: self._projected(step, IN, self._noisy(s_in, "upload")),
            OUT: self._projected(step, OUT, self._noisy(s_out, "upload")),
        }
        if step.broadcast:
            payload[IN_LOSS] = step.scratch[SCRATCH]["loss"] / step.num_steps
        return payload, {}

    def features(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return s_in and s_out (Eq. 4 and 5)."""
        extractor, *between, _ = chain_of(model)
        s_in = self._noisy(extractor.run(inputs), "forward")
        return s_in, self._noisy(run(between, s_in), "forward")

    def _noisy(self, features: Tensor, where: str) -> Tensor:
        if not self.settings.noise or self.settings.noise_on != where:
            return features
        values = features.detach().float()
        if self.settings.noise_deviation == "coordinate":
            deviation = values.std(0, correction=0, keepdim=True)
        else:
            deviation = values.std(correction=0)
        noise = torch.randn_like(features, dtype=torch.float32)
        return features + (noise * (self.settings.noise * deviation)).to(features.dtype)

    def _inner_backward(self, step: Step) -> None:
        loss = self.inner_loss(step)
        step.scratch[SCRATCH]["loss"].add_(loss.detach())
        step.backward(loss)

    def inner_loss(self, step: Step) -> Tensor:
        """Return L_IN (Eq. 7)."""
        between = chain_of(step.model)[1:-1]
        received = step.as_features(self.restored(step, step.broadcast[IN]))
        with self._running_statistics(step):
            s_out = run(between, received)
        return self._distance(step, s_out)

    def _running_statistics(self, step: Step) -> AbstractContextManager[None]:
        """Let passes on received features update the running statistics, or not."""
        return step.preserve_buffers() if self.settings.running == "local" else nullcontext()

    def _distance(self, step: Step, s_out: Tensor) -> Tensor:
        """Return the mean squared distance to the received s_out."""
        return F.mse_loss(self._projected(step, OUT, s_out), step.broadcast[OUT])

    def _projected(self, step: Step, end: str, features: Tensor) -> Tensor:
        features = features.float()
        if not self.settings.projection:
            return features.contiguous()
        return F.linear(features.flatten(1), step.scratch[SCRATCH][end])

    def restored(self, step: Step, vectors: Tensor) -> Tensor:
        """Return received features in the shape of the client's own s_in."""
        if not self.settings.projection:
            return vectors
        return (vectors @ step.scratch[SCRATCH][IN]).unflatten(1, self._shapes[step.size][0])


class FedINServer(ServerAlgorithm):
    """FedAvg, and a pool of features."""

    settings: FedInSettings

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        rng = generator(self.info.seed, "features", round_number, client)
        shapes = self._sent_shapes(self.info.size_of(client, round_number))
        return draw(own, client, shapes, self.settings.samples, rng)

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        return collect(own, updates, self.settings.pool, self.settings.stale)

    def metrics(self, own: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return L_IN, the number of clients in the pool, and the megabytes of features that were
        sent.
        """
        numbers = super().metrics(own, updates)
        if self.settings.samples:
            sent = 0
            for update in updates:
                sent += sum(t.nbytes for name, t in update.payload.items() if name in (IN, OUT))
            numbers["pool"] = float(len(entries(own)))
            numbers["feature_mb_up"] = sent / 1e6
        return numbers

    def _sent_shapes(self, size: str) -> Shapes:
        """Return the shapes in which the features of a size are sent."""
        if self.settings.projection:
            vector = torch.Size([self.settings.projection])
            return vector, vector
        return self._shapes[size]

    @cached_property
    def _shapes(self) -> dict[str, Shapes]:
        return feature_shapes(self.info.split, self.info.input_shape)


@METHODS.register(
    "fedin", "intermediate layers learn from others' features", paper="Chan et al., TMLR submission"
)
class FedIN(Method):
    """FedProx, with a second loss and a pool of features."""

    Settings = FedInSettings
    Client = FedINClient
    Server = FedINServer
    requirements = Requirements(payload=True, own_training=True, own_aggregation=True, stages=True)

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        for size, blueprint in info.split.blueprints.items():
            if not intermediate(blueprint.module):
                raise MotleyError(
                    f"model.sizes: {size!r} has no layers between the first and the head to train "
                    "by IN."
                )


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None


def weighted(x: Tensor, weight: float) -> Tensor:
    """Return `x`, whose gradient is multiplied by `weight` on its way back."""
    y: Tensor = x if weight == 1 else _Weighted.apply(x, weight)
    return y


def intermediate(model: nn.Module) -> list[str]:
    """Return the names of the parameters between extractor and classifier."""
    return owned(model, chain_of(model)[1:-1])


def feature_shapes(split: Split, image: InputShape) -> dict[str, Shapes]:
    """Return the shapes of s_in and s_out of one image, for every size."""
    shapes = {}
    for size, blueprint in split.blueprints.items():
        model = blueprint.module
        shapes[size] = shape_behind(model, 1, image), shape_behind(model, -1, image)
    return shapes


def projected(inner: State, local: State) -> State:
    """Return Eq. 12 for each tensor: the nearest to G_IN that does not point against G_local.

    With b = <G_local, G_IN> and a = |G_local|^2 it is G_IN if b >= 0, and G_IN - b / a G_local
    otherwise.
    """
    a = torch.stack(list(norms(local).values())).square()
    b = torch.stack([(local[name] * inner[name]).sum() for name in local])
    back = (-b / (a + torch.finfo(a.dtype).tiny)).clamp_min(0)
    result = {}
    for name, factor in zip(local, back.unbind(), strict=True):
        result[name] = inner[name] + local[name] * factor
    return result
