"""The methods as their papers write them, one client after the other, with autograd, deep copies and torch.optim.

Nothing of the engine or of the methods is used here, and nothing is grouped, captured or in place. Everybody holds the
same model, so names need no owners.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from motley.models.stages import features

Batch = tuple[Tensor, Tensor]
Vector = list[Tensor]


@dataclass
class Reference:
    """A federation of equal models: its server, and what each client keeps."""

    model: nn.Module
    clients: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    lr: float
    kept: dict[int, Vector] = field(default_factory=dict)
    previous: dict[int, nn.Module] = field(default_factory=dict)
    server: Vector = field(default_factory=list)

    def zeros(self) -> Vector:
        return [torch.zeros_like(p) for p in self.model.parameters()]

    def mean(self, models: list[nn.Module]) -> Vector:
        return [
            torch.stack(list(ps)).mean(0).detach()
            for ps in zip(*(m.parameters() for m in models), strict=True)
        ]

    def become(self, weights: Vector) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(value)

    def trained(
        self, batches: list[Batch], penalty: Callable[[nn.Module, Batch], Tensor | float]
    ) -> nn.Module:
        """Minimise cross entropy + penalty from the server's weights."""
        model = copy.deepcopy(self.model).train()
        optimizer = self.optimizer(list(model.parameters()))
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels) + penalty(
                model, (images, labels)
            )
            loss.backward()
            optimizer.step()
        return model

    def away(self, model: nn.Module) -> Vector:
        return [
            p.detach() - w.detach()
            for p, w in zip(model.parameters(), self.model.parameters(), strict=True)
        ]

    def squared_distance(self, model: nn.Module) -> Tensor:
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return torch.stack([(p - w.detach()).square().sum() for p, w in pairs]).sum()

    def distances(self, model: nn.Module) -> Tensor:
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return torch.stack([(p - w.detach()).norm() for p, w in pairs]).sum()

    def norms_of_squares(self, model: nn.Module) -> Tensor:
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return torch.stack([(p - w.detach()).square().norm() for p, w in pairs]).sum()


def inner(vector: Vector, model: nn.Module) -> Tensor:
    return torch.stack(
        [(v * p).sum() for v, p in zip(vector, model.parameters(), strict=True)]
    ).sum()


def fedprox(fl: Reference, turns: dict[int, list[Batch]], mu: float, term: str = "squared") -> None:
    distance = {
        "squared": fl.squared_distance,
        "norms": fl.distances,
        "norm-of-squares": fl.norms_of_squares,
    }[term]
    models = [fl.trained(batches, lambda m, _: mu / 2 * distance(m)) for batches in turns.values()]
    fl.become(fl.mean(models))


def scaffold(
    fl: Reference, turns: dict[int, list[Batch]], gradient: bool, sampled: bool = False
) -> None:
    """Algorithm 1 with option II; `gradient`: c - c_i joins the gradient, or else the weights after each step."""
    fl.server = fl.server or fl.zeros()
    models, total = [], fl.zeros()
    for client, batches in turns.items():
        own = fl.kept.get(client, fl.zeros())
        drift = [c - c_i for c, c_i in zip(fl.server, own, strict=True)]
        if gradient:
            model = fl.trained(batches, lambda m, _, drift=drift: inner(drift, m))
        else:
            model = copy.deepcopy(fl.model).train()
            optimizer = fl.optimizer(list(model.parameters()))
            for images, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                with torch.no_grad():
                    for p, d in zip(model.parameters(), drift, strict=True):
                        p.sub_(fl.lr * d)
        new = [
            c_i - c - a / (len(batches) * fl.lr)
            for c_i, c, a in zip(own, fl.server, fl.away(model), strict=True)
        ]
        total = [t + n - c_i for t, n, c_i in zip(total, new, own, strict=True)]
        fl.kept[client] = new
        models.append(model)
    divisor = len(turns) if sampled else fl.clients
    fl.server = [c + t / divisor for c, t in zip(fl.server, total, strict=True)]
    fl.become(fl.mean(models))


def fednova(fl: Reference, turns: dict[int, list[Batch]], momentum: float) -> None:
    models = [fl.trained(batches, lambda m, _: 0.0) for batches in turns.values()]
    taus = [len(batches) for batches in turns.values()]
    a = [(t - momentum * (1 - momentum**t) / (1 - momentum)) / (1 - momentum) for t in taus]
    rates = [[d / a_i for d in fl.away(model)] for model, a_i in zip(models, a, strict=True)]
    mean = [torch.stack(column).mean(0) for column in zip(*rates, strict=True)]
    effective = sum(a) / len(a)
    fl.become(
        [w.detach() + effective * d for w, d in zip(fl.model.parameters(), mean, strict=True)]
    )


def feddyn(fl: Reference, turns: dict[int, list[Batch]], alpha: float) -> None:
    """Algorithm 1 of the paper: grad_i at clients, h at the server."""
    fl.server = fl.server or fl.zeros()
    models, total = [], fl.zeros()
    for client, batches in turns.items():
        grad = fl.kept.get(client, fl.zeros())
        model = fl.trained(
            batches, lambda m, _, grad=grad: alpha / 2 * fl.squared_distance(m) - inner(grad, m)
        )
        fl.kept[client] = [g - alpha * d for g, d in zip(grad, fl.away(model), strict=True)]
        total = [t + d for t, d in zip(total, fl.away(model), strict=True)]
        models.append(model)
    fl.server = [h - alpha / fl.clients * t for h, t in zip(fl.server, total, strict=True)]
    fl.become([m - h / alpha for m, h in zip(fl.mean(models), fl.server, strict=True)])


def gradients_here_and_uphill(
    model: nn.Module, images: Tensor, labels: Tensor, rho: float
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    loss = nn.functional.cross_entropy(model(images), labels)
    first = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in first]).norm()
    up = copy.deepcopy(model)
    with torch.no_grad():
        for p, g in zip(up.parameters(), first, strict=True):
            p.add_(rho * g / norm)
    loss = nn.functional.cross_entropy(up(images), labels)
    return first, torch.autograd.grad(loss, list(up.parameters()))


def fedspeed(
    fl: Reference, turns: dict[int, list[Batch]], alpha: float, rho: float, ascent: float
) -> None:
    """The authors' code form: lambda_i at clients; the server adds the mean of all lambda to the mean of w_i."""
    models = []
    for client, batches in turns.items():
        dual = fl.kept.get(client, fl.zeros())
        model = copy.deepcopy(fl.model).train()
        optimizer = fl.optimizer(list(model.parameters()))
        for images, labels in batches:
            first, second = gradients_here_and_uphill(model, images, labels, rho)
            parts = zip(model.parameters(), first, second, dual, fl.model.parameters(), strict=True)
            for p, g1, g2, d, w in parts:
                p.grad = (1 - ascent) * g1 + ascent * g2 + alpha * (p.detach() - w.detach() + d)
            optimizer.step()
        fl.kept[client] = [d + a for d, a in zip(dual, fl.away(model), strict=True)]
        models.append(model)
    duals = [fl.kept.get(client, fl.zeros()) for client in range(fl.clients)]
    drift = [torch.stack(column).mean(0) for column in zip(*duals, strict=True)]
    fl.become([m + d for m, d in zip(fl.mean(models), drift, strict=True)])


def fedsam(fl: Reference, turns: dict[int, list[Batch]], rho: float) -> None:
    models = []
    for batches in turns.values():
        model = copy.deepcopy(fl.model).train()
        optimizer = fl.optimizer(list(model.parameters()))
        for images, labels in batches:
            _, second = gradients_here_and_uphill(model, images, labels, rho)
            for p, g in zip(model.parameters(), second, strict=True):
                p.grad = g
            optimizer.step()
        models.append(model)
    fl.become(fl.mean(models))


def moon(fl: Reference, turns: dict[int, list[Batch]], mu: float, temperature: float) -> None:
    models = []
    frozen = copy.deepcopy(fl.model).eval()
    for client, batches in turns.items():
        previous = fl.previous.get(client, frozen)

        def contrast(model: nn.Module, batch: Batch, previous: nn.Module = previous) -> Tensor:
            z, z_global, z_previous = (features(m, batch[0]) for m in (model, frozen, previous))
            similar = nn.functional.cosine_similarity
            logits = (
                torch.stack([similar(z, z_global.detach()), similar(z, z_previous.detach())], 1)
                / temperature
            )
            return -mu * nn.functional.log_softmax(logits, 1)[:, 0].mean()

        model = fl.trained(batches, contrast)
        fl.previous[client] = copy.deepcopy(model).eval()
        models.append(model)
    fl.become(fl.mean(models))
