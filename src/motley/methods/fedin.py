"""FedIN: intermediate layers learn from other clients' features.

Chan et al., FedIN: Federated Intermediate Layers Learning for Model Heterogeneity, submitted to TMLR. A model is an
extractor, intermediate layers and a classifier: the first stage of its chain, those between, and the head. With its
part a client receives (s_in, s_out), what entered and left the intermediate layers of others on one batch, and steps on

    L_local = cross entropy + mu / 2 |w - w_received|^2        all layers
    L_IN = mean squared error(intermediate(s_in), s_out)       intermediate layers only

whose gradients are combined where both are (`combine`). Then it sends the features of a batch of its own. The server
keeps each client's newest and never returns them to it; the first round has none and is FedProx's.

The paper leaves some things open. Here the proximal gradient is part of G_local, Eq. 12 holds for each tensor by
itself, and features are taken in training mode, as the intermediate layers of others will see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator, torch_seed
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, REPORTED, FederationInfo, Method, MethodSettings
from motley.methods.feature_pool import IN, OUT, Shapes, collect, draw, entries
from motley.methods.fedprox import Proximal
from motley.models.layers import apart
from motley.models.stages import chain_of, owned, run, shape_behind

if TYPE_CHECKING:
    from motley.engine.learner import Learner


IN_LOSS = f"{REPORTED}in_loss"
"""The mean of L_IN over a turn's steps; while the turn lasts, its sum."""
Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


class FedInSettings(MethodSettings):
    """FedIN's own settings."""

    name: str = "fedin"
    mu: float = Field(default=0.1, ge=0)
    """Weight of the proximal term; the paper writes mu / 2 = 0.05. 0 is its ablation "w/o Prox"."""
    proximal: Proximal = "squared"
    """The proximal term, as for FedProx. squared: mu/2 |theta - w|^2. norms: mu/2 times the sum of |theta - w|."""
    combine: Literal["simplified", "exact", "sum"] = "simplified"
    """How the gradients are combined. simplified: G_IN + multiplier / 2 G_local (Eq. 13). exact: G_IN without its
    component against G_local, and without G_local itself (Eq. 12). sum: G_IN + G_local, the ablation "w/o Opt".
    """
    multiplier: float = Field(default=1.0, gt=0)
    """Lambda of Eq. 13."""
    step: Literal["joint", "separate"] = "joint"
    """joint: one step with the combined gradient. separate: FedProx's step, then a step on L_IN with an optimiser of
    its own.
    """
    samples: int = Field(default=1, ge=0)
    """Number of other clients whose features a client receives (Figure 6d). 0: none, the ablation "w/o IN"."""
    batch: int = Field(default=0, ge=0)
    """Number of examples in a client's features; 0: the training batch size."""
    pool: int = Field(default=100, ge=1)
    """Maximum number of clients whose features the server keeps; the most recent ones stay."""
    stale: bool = True
    """Keep features of rounds before the last one."""
    noise: float = Field(default=0.0, ge=0)
    """Noise on s_in and s_out, as a multiple of their standard deviations; 0.8 in the paper's "+Noise"."""
    noise_on: Literal["forward", "upload"] = "forward"
    """forward: noise throughout training, and so on sent features too. upload: noise on sent features only."""
    running: Literal["both", "local"] = "both"
    """Passes that update the running statistics of normalisation. both: also those on received features. local: only
    those on the client's own examples.
    """
    projection: int = Field(default=0, ge=0)
    """Length of the vectors to which features are projected, so that models of different widths and families can
    exchange them. 0: no projection; features go to models in which they have the same shape.
    """

    @model_validator(mode="after")
    def _separate_steps_combine_nothing(self) -> FedInSettings:
        if self.step == "separate" and self.combine != "simplified":
            raise ValueError(f"combine = {self.combine!r} is for step = 'joint'; separate steps combine no gradients")
        return self


@METHODS.register("fedin", "intermediate layers learn from others' features", paper="Chan et al., TMLR submission")
class FedIN(Method):
    """FedProx, and a second loss for the intermediate layers: one more pass through them a step."""

    Settings = FedInSettings
    settings: FedInSettings

    def __init__(self, settings: MethodSettings, world: FederationInfo) -> None:
        super().__init__(settings, world)
        for size, blueprint in world.split.blueprints.items():
            if not intermediate(blueprint.module):
                raise MotleyError(f"model.sizes: {size!r} has no layers between the first and the head to train by IN.")

    # ---- server

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        numbers = generator(self.info.seed, "features", round_number, client)
        shapes = self._travelling(self.info.size_of(client, round_number))
        return draw(server, client, shapes, self.settings.samples, numbers)

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        return collect(server, updates, self.settings.pool, self.settings.stale)

    def metrics(self, server: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return L_IN, whose features the pool has, and how many megabytes of features were sent for it."""
        sent = sum(tensor.nbytes for u in updates for name, tensor in u.payload.items() if name in (IN, OUT))
        own = {"pool": float(len(entries(server))), "feature_mb_up": sent / 1e6}
        return {**super().metrics(server, updates), **(own if self.settings.samples else {})}

    def _travelling(self, size: str) -> Shapes:
        """Return the shapes in which the features of a size travel."""
        vector = torch.Size([self.settings.projection])
        return (vector, vector) if self.settings.projection else self._shapes[size]

    @cached_property
    def _shapes(self) -> dict[str, Shapes]:
        chains = {size: chain_of(blueprint.module) for size, blueprint in self.info.split.blueprints.items()}
        image = self.info.image
        return {size: (shape_behind(c[:1], image), shape_behind(c[:-1], image)) for size, c in chains.items()}

    # ---- client

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        _, s_out = self._features(learner, images)
        return learner.cross_entropy(run(chain_of(learner.model)[-1:], s_out), labels)

    @property
    def by_norms(self) -> bool:
        """Whether the proximal term is a sum of norms."""
        return self.settings.proximal == "norms"

    def step(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        if not learner.message or self.settings.step == "separate":
            return self._local_step(learner, images, labels)
        exact = self.settings.combine == "exact"
        loss = (self._backward_projected if exact else self._backward_together)(learner, images, labels)
        self.descend(learner)
        return loss.detach()

    def _local_step(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        """Take FedProx's step, and where there are features one of L_IN after it."""
        loss = self.loss(learner, images, labels)
        learner.backward(loss)
        learner.pull(self.settings.mu, by_norms=self.by_norms)
        self.descend(learner)
        if learner.message:
            self._inner_backward(learner)
            learner.optimizer_of(intermediate(learner.model)).step()
            learner.publish()
        return loss.detach()

    def _backward_together(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        """Leave G_IN + weight G_local where both are, and G_local elsewhere; return L_local without its pull.

        Batch and features go through the intermediate layers as one, each half normalised by itself. What comes back
        from the head is weighted before it enters them, and what leaves them for the extractor is weighted back.
        """
        weight = self.settings.multiplier / 2 if self.settings.combine == "simplified" else 1.0
        extractor, *between, head = chain_of(learner.model)
        s_in = weighted(self._noisy(extractor.run(images), "forward"), 1 / weight)
        received = self._restored(learner, learner.message[IN]).to(learner.dtype)
        with apart(learner.model, len(images), both=self.settings.running == "both"):
            both = run(between, torch.cat([s_in, received]))
        s_out, answered = both.split([len(images), len(received)])
        loss = learner.cross_entropy(head.run(weighted(self._noisy(s_out, "forward"), weight)), labels)
        inner = self._distance(learner, answered)
        learner.notes[IN_LOSS].add_(inner.detach())
        learner.backward(loss + inner)
        mu, inside = self.settings.mu, set(intermediate(learner.model))
        strengths = {name: weight * mu if name in inside else mu for name in learner.parameters}
        learner.pull(strengths, by_norms=self.by_norms)
        return loss

    def _backward_projected(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        """Leave Eq. 12's gradient where both are, and G_local elsewhere. It needs both, so there are two passes."""
        between = intermediate(learner.model)
        self._inner_backward(learner)
        inner = torch._foreach_mul(learner.gradients_of(between), 1.0)
        loss = self.loss(learner, images, labels)
        learner.backward(loss)
        offsets = learner.offsets(by_norms=self.by_norms)
        torch._foreach_add_(learner.gradients, offsets, alpha=self.settings.mu)
        local = learner.gradients_of(between)
        torch._foreach_copy_(local, projected(inner, local))
        return loss

    @torch.no_grad()
    def payload(self, learner: Learner) -> State:
        if not self.settings.samples:
            return {}
        images = learner.first_images(self.settings.batch or learner.training.batch_size)
        features = dict(zip((IN, OUT), self._features(learner, images), strict=True))
        sent = {end: self._projected(learner, end, self._noisy(s, "upload")) for end, s in features.items()}
        return {**sent, IN_LOSS: learner.notes[IN_LOSS] / learner.taken} if learner.message else sent

    def _features(self, learner: Learner, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return s_in and s_out (Eq. 4 and 5)."""
        extractor, *between, _ = chain_of(learner.model)
        s_in = self._noisy(extractor.run(images), "forward")
        return s_in, self._noisy(run(between, s_in), "forward")

    def _noisy(self, features: Tensor, where: str) -> Tensor:
        if not self.settings.noise or self.settings.noise_on != where:
            return features
        deviation = features.detach().float().std(correction=0)
        noise = torch.randn_like(features, dtype=torch.float32) * (self.settings.noise * deviation)
        return features + noise.to(features.dtype)

    def _inner_backward(self, learner: Learner) -> None:
        loss = self._inner_loss(learner)
        learner.notes[IN_LOSS].add_(loss.detach())
        learner.backward(loss)

    def _inner_loss(self, learner: Learner) -> Tensor:
        """Return L_IN (Eq. 7)."""
        between = chain_of(learner.model)[1:-1]
        with learner.same_buffers() if self.settings.running == "local" else nullcontext():
            s_out = run(between, self._restored(learner, learner.message[IN]).to(learner.dtype))
        return self._distance(learner, s_out)

    def _distance(self, learner: Learner, s_out: Tensor) -> Tensor:
        """Return the mean squared distance to the s_out of others."""
        return F.mse_loss(self._projected(learner, OUT, s_out), learner.message[OUT])

    # ---- features of one length: a fixed random projection for each shape, and back by its transpose

    def before_training(self, learner: Learner) -> None:
        learner.note(IN_LOSS, torch.zeros(()))
        if self.settings.projection and IN not in learner.notes:
            for end, shape in zip((IN, OUT), self._own_shapes(learner), strict=True):
                matrix = torch.empty(self.settings.projection, shape.numel())
                with torch_seed(self.info.seed, "projection", end, shape.numel()):
                    learner.note(end, nn.init.orthogonal_(matrix))

    def _projected(self, learner: Learner, end: str, features: Tensor) -> Tensor:
        features = features.float()
        return F.linear(features.flatten(1), learner.notes[end]) if self.settings.projection else features.contiguous()

    def _restored(self, learner: Learner, vectors: Tensor) -> Tensor:
        if not self.settings.projection:
            return vectors
        return (vectors @ learner.notes[IN]).unflatten(1, self._own_shapes(learner)[0])

    def _own_shapes(self, learner: Learner) -> Shapes:
        assert learner.job is not None
        return self._shapes[learner.job.size]


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None


def weighted(x: Tensor, weight: float) -> Tensor:
    """Return `x`, whose gradient is multiplied on its way back."""
    y: Tensor = x if weight == 1 else _Weighted.apply(x, weight)
    return y


def intermediate(model: nn.Module) -> list[str]:
    """Return the parameters between extractor and classifier."""
    return owned(model, chain_of(model)[1:-1])


def projected(inner: Tensors, local: Tensors) -> tuple[Tensor, ...]:
    """Return Eq. 12 for each tensor: the nearest to G_IN that does not point against G_local.

    With b = <G_local, G_IN> and a = |G_local|^2 it is G_IN where b >= 0, and G_IN - b / a G_local elsewhere.
    """
    a = torch.stack(torch._foreach_norm(local)).square()
    b = torch.stack([(one * other).sum() for one, other in zip(local, inner, strict=True)])
    back = (-b / (a + torch.finfo(a.dtype).tiny)).clamp_min(0)
    return torch._foreach_add(inner, torch._foreach_mul(local, back.unbind()))
