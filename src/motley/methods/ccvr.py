"""CCVR: the last layer is calibrated on virtual features after training.

Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
Data, NeurIPS 2021. Clients train by another method, here FedAvg. Afterwards every client passes
its data through the final model and sends, for each class c, the number n of its examples and the
mean m and covariance S of their features, the inputs of the last layer. The server computes mean
and covariance of all clients' features (written with the means' distances, which loses fewer
digits):

    m_c = sum_k n_k m_k / n
    S_c = (sum_k (n_k - 1) S_k + sum_k n_k (m_k - m_c) (m_k - m_c)^T) / (n - 1)

draws virtual features of each class from the normal distribution N(m_c, S_c), in proportion to the
class's examples, and trains the last layer on them with the cross-entropy.

Each size has distributions of its own. A last layer that several sizes share is trained on the
virtual features of all of them. The paper applies CCVR to FedAvg, FedProx, FedAvgM and MOON:
`ccvr`, `ccvr-prox`, `server.optimizer.name = "momentum"`, and `ccvr-moon`. The defaults of the
calibration (number of virtual features, epochs, learning rate) are Motley's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.core.part import State
from motley.core.randomness import key
from motley.methods.base import (
    METHODS,
    ClientAlgorithm,
    Collection,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.fedprox import FedProx, FedProxClient, FedProxSettings
from motley.methods.info import FederationInfo
from motley.methods.last_layer import (
    LastLayer,
    finite,
    is_calibration_due,
    last_inputs,
    last_layers,
)
from motley.methods.moon import Moon, MoonClient, MoonSettings
from motley.methods.step import Step

PAPER = "Luo et al., NeurIPS 2021"


class CCVRSettings(MethodSettings):
    """CCVR's own settings."""

    name: str = "ccvr"
    virtual: int = Field(default=100, ge=0)
    """Mean number of virtual features per class. 0: no calibration."""
    balance: Literal["examples", "equal"] = "examples"
    """Numbers of virtual features of the classes. examples: in proportion to the clients'
    examples. equal: the same for every class.
    """
    every: int = Field(default=0, ge=0)
    """Rounds between calibrations; the last round always has one. 0: only that one. After an
    earlier one, training continues from the calibrated layer, unless there is a moving average
    (`server.ema_decay`), which is then calibrated instead.
    """
    calibration_epochs: int = Field(default=10, ge=1)
    """Passes over the virtual features."""
    calibration_batch: int = Field(default=64, ge=1)
    """Batch size of the calibration."""
    calibration_lr: float = Field(default=0.01, gt=0)
    """Learning rate of the calibration, by SGD."""
    calibration_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the calibration."""


class Gaussians(NamedTuple):
    """The features of each class: number of examples, mean and covariance."""

    counts: Tensor
    mean: Tensor
    covariance: Tensor


class CCVRClient(ClientAlgorithm):
    """FedAvg, and a collection of feature statistics. May stand before another client half."""

    settings: CCVRSettings

    def collect(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Return the classes that the client has, and the statistics of their features."""
        counts: dict[int, int] = {}
        sums: dict[int, Tensor] = {}
        products: dict[int, Tensor] = {}
        for features, labels in last_inputs(step, batches):
            for label in labels.unique().tolist():
                x = features[labels == label]
                counts[label] = counts.get(label, 0) + len(x)
                sums[label] = sums.get(label, 0) + x.sum(0)
                products[label] = products.get(label, 0) + x.t() @ x
        present = sorted(counts)
        means, covariances = [], []
        for label in present:
            mean = sums[label] / counts[label]
            scatter = products[label] - counts[label] * torch.outer(mean, mean)
            means.append(mean)
            covariances.append(scatter / max(counts[label] - 1, 1))
        device = means[0].device
        return {
            "classes": torch.tensor(present, device=device),
            "counts": torch.tensor([counts[label] for label in present], device=device),
            "mean": torch.stack(means).float(),
            "covariance": torch.stack(covariances).float(),
        }


class CCVRServer(ServerAlgorithm):
    """FedAvg, and the calibration. May stand before another server half."""

    settings: CCVRSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        self._layers = last_layers(info.split, settings.name)

    def collection_clients(self, round_number: int) -> Sequence[int]:
        if not self.settings.virtual:
            return ()
        due = is_calibration_due(self.info, self.settings.every, round_number)
        return range(len(self.info.sizes)) if due else ()

    def apply_collection(
        self, own: State, state: State, collections: Sequence[Collection]
    ) -> tuple[State, State]:
        state = dict(state)
        collections = finite(collections)
        for layer in dict.fromkeys(self._layers.values()):
            sizes = [size for size, other in self._layers.items() if other == layer]
            features, labels = self._virtual_features(layer, sizes, collections)
            if len(labels):
                generator = torch.Generator(features.device)
                round_number = collections[0].round_number
                generator.manual_seed(
                    key(self.info.seed, "calibration", round_number, layer.weight)
                )
                state.update(self._calibrated(layer, state, features, labels, generator))
        return own, state

    def _virtual_features(
        self, layer: LastLayer, sizes: Sequence[str], collections: Sequence[Collection]
    ) -> tuple[Tensor, Tensor]:
        """Draw features for one layer from the distributions of the sizes that have it."""
        features, labels = [], []
        for size in sizes:
            answers = [collection for collection in collections if collection.size == size]
            if not answers:
                continue
            gaussians = pooled(
                [answer.values for answer in answers], self.info.classes, layer.width
            )
            numbers = virtual_numbers(gaussians.counts, self.settings)
            generator = torch.Generator(gaussians.mean.device)
            round_number = answers[0].round_number
            generator.manual_seed(key(self.info.seed, "virtual features", round_number, size))
            x, y = draw(gaussians, numbers, generator)
            features.append(x)
            labels.append(y)
        if not features:
            return torch.zeros(0, layer.width), torch.zeros(0, dtype=torch.long)
        return torch.cat(features).float(), torch.cat(labels)

    def _calibrated(
        self,
        layer: LastLayer,
        state: State,
        features: Tensor,
        labels: Tensor,
        generator: torch.Generator,
    ) -> State:
        """Return the tensors of a last layer after training on virtual features."""
        names = [name for name in (layer.weight, layer.bias) if name is not None]
        tensors = [state[name].detach().clone().requires_grad_() for name in names]
        optimizer = torch.optim.SGD(
            tensors, lr=self.settings.calibration_lr, momentum=self.settings.calibration_momentum
        )
        for _ in range(self.settings.calibration_epochs):
            order = torch.randperm(len(labels), generator=generator, device=features.device)
            for rows in order.split(self.settings.calibration_batch):
                with torch.enable_grad():
                    loss = F.cross_entropy(F.linear(features[rows], *tensors), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}


def pooled(answers: Sequence[State], classes: int, width: int) -> Gaussians:
    """Return the statistics of all clients' features together, in double precision."""
    device = answers[0]["mean"].device
    counts = torch.zeros(classes, dtype=torch.float64, device=device)
    mean = torch.zeros(classes, width, dtype=torch.float64, device=device)
    scatter = torch.zeros(classes, width, width, dtype=torch.float64, device=device)
    for answer in answers:
        for row, label in enumerate(_checked_classes(answer, classes, width)):
            number = answer["counts"][row].double()
            counts[label] += number
            mean[label] += number * answer["mean"][row].double()
    mean = mean / counts.clamp_min(1)[:, None]
    for answer in answers:
        for row, label in enumerate(answer["classes"].tolist()):
            number = answer["counts"][row].double()
            apart = answer["mean"][row].double() - mean[label]
            scatter[label] += (number - 1) * answer["covariance"][row].double()
            scatter[label] += number * torch.outer(apart, apart)
    return Gaussians(counts, mean, scatter / (counts - 1).clamp_min(1)[:, None, None])


def _checked_classes(answer: State, classes: int, width: int) -> list[int]:
    """Return the classes of an answer. Raise if it does not have statistics of each."""
    present: list[int] = answer["classes"].tolist()
    rows = len(present)
    shapes = {"counts": (rows,), "mean": (rows, width), "covariance": (rows, width, width)}
    for name, shape in shapes.items():
        if answer[name].shape != shape:
            raise ValueError(f"{name!r} has shape {tuple(answer[name].shape)}, not {shape}")
    if len(set(present) & set(range(classes))) != rows:
        raise ValueError(f"'classes' is {present}: a class is unknown or named twice")
    if bool((answer["counts"] < 1).any()):
        raise ValueError("'counts' has a class without examples")
    return present


def virtual_numbers(counts: Tensor, settings: CCVRSettings) -> list[int]:
    """Return the number of virtual features of each class; 0 for a class without examples."""
    if settings.balance == "equal":
        shares = (counts > 0).double()
    else:
        shares = counts * len(counts) / counts.sum()
    return [max(1, round(settings.virtual * share)) if share else 0 for share in shares.tolist()]


def draw(
    gaussians: Gaussians, numbers: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw features from the normal distribution of each class; return them and their labels."""
    device, width = gaussians.mean.device, gaussians.mean.shape[1]
    features, labels = [], []
    for label, number in enumerate(numbers):
        if number:
            shape = (number, width)
            noise = torch.randn(shape, dtype=torch.float64, device=device, generator=generator)
            root = square_root(gaussians.covariance[label])
            features.append(gaussians.mean[label] + noise @ root)
            labels.append(torch.full((number,), label, device=device))
    return torch.cat(features), torch.cat(labels)


def square_root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root of a covariance.

    Unlike Cholesky's factor it exists for singular covariances, which are common: some features are
    always zero, and a class may have fewer examples than features. It also changes little if the
    covariance does, so that rounding errors do not change the draws.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.t()


@METHODS.register("ccvr", "FedAvg, and a last layer calibrated on virtual features", paper=PAPER)
class CCVR(Method):
    """FedAvg, with a calibration after it."""

    Settings = CCVRSettings
    Client = CCVRClient
    Server = CCVRServer
    requirements = Requirements(collection=True, stages=True, classes=True, uses_total_rounds=True)


# ---- after other methods


class CCVRProxSettings(CCVRSettings, FedProxSettings):
    """The settings of both."""

    name: str = "ccvr-prox"


class CCVRProxClient(CCVRClient, FedProxClient):
    """FedProx's training, and CCVR's collection."""

    settings: CCVRProxSettings


@METHODS.register("ccvr-prox", "CCVR after FedProx", paper=PAPER)
class CCVRProx(CCVR):
    """FedProx, with a calibration after it."""

    Settings = CCVRProxSettings
    Client = CCVRProxClient
    requirements = CCVR.requirements.combined(FedProx.requirements)


class CCVRMoonSettings(CCVRSettings, MoonSettings):
    """The settings of both."""

    name: str = "ccvr-moon"


class CCVRMoonClient(CCVRClient, MoonClient):
    """MOON's training, and CCVR's collection."""

    settings: CCVRMoonSettings


@METHODS.register("ccvr-moon", "CCVR after MOON", paper=PAPER)
class CCVRMoon(CCVR):
    """MOON, with a calibration after it."""

    Settings = CCVRMoonSettings
    Client = CCVRMoonClient
    requirements = CCVR.requirements.combined(Moon.requirements)
