"""SphereFed: all clients learn unit features for one fixed, orthonormal last layer.

Dong et al., SphereFed: Hyperspherical Federated Learning, ECCV 2022. The rows of the last layer W,
one per class, are orthonormal. They are the same at all clients, never trained, and there is no
bias. With unit features z = f(x) / |f(x)| a client minimizes the squared error

    scale * |W z - y|^2        y: 1 for the label, 0 for other classes

After training the last layer is calibrated in closed form: clients send Z^T Z and Z^T Y of all
their examples, where Z has one feature per row and Y one y, and the server replaces W by the least
squares solution over all clients,

    W*^T = (sum Z^T Z)^-1 (sum Z^T Y)

The evaluated model does not normalize features, and need not: without a bias the length of a
feature does not change which class has the largest logit. Its test loss has no meaning, though.
Clients draw W from the run's seed, so it does not travel. They do not use the last layer of the
part that they receive, and the server writes W (or W*) into it after every round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import torch_seed
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
from motley.methods.info import FederationInfo
from motley.methods.labels import one_hot
from motley.methods.last_layer import finite, is_calibration_due, last_inputs, last_layers
from motley.methods.step import Step
from motley.models.projection import representation_and_answer

#: Prefix of the fixed layers in the server's state.
OWN = "fixed/"
#: Where the client half keeps the fixed layer.
SCRATCH = "spherefed"
#: The tensors that a client sends in a collection: Z^T Z and Z^T Y.
GRAM, PRODUCTS = "gram", "products"


class SphereFedSettings(MethodSettings):
    """SphereFed's own settings."""

    name: str = "spherefed"
    scale: float = Field(default=1.0, gt=0)
    """Factor on the squared error, which is a sum over classes and a mean over examples. With 1 /
    classes it is torch's mean squared error. Gradients are smaller than those of the cross-entropy,
    so the learning rate needs tuning of its own.
    """
    calibrate: bool = True
    """Replace the last layer by the least squares solution after the last round."""
    every: int = Field(default=0, ge=0)
    """Rounds between calibrations; the last round always has one. 0: only that one. Training is not
    affected by them. Without `calibrate` there are none.
    """
    ridge: float = Field(default=1e-6, ge=0)
    """Added to the diagonal of Z^T Z, as a multiple of its mean."""


def fixed_layer(seed: int, classes: int, width: int) -> Tensor:
    """Return W: one unit vector per class, all of them orthogonal."""
    with torch_seed(seed, "fixed layer", classes, width):
        return nn.init.orthogonal_(torch.empty(classes, width))


class SphereFedClient(ClientAlgorithm):
    """FedAvg with the squared error, and a collection for the calibration."""

    settings: SphereFedSettings

    def before_training(self, step: Step) -> None:
        if SCRATCH not in step.scratch:
            layer = last_layers(self.info.split, self.settings.name)[step.size]
            fixed = fixed_layer(self.info.seed, self.info.classes, layer.width)
            step.keep(SCRATCH, {"weight": fixed})

    def loss(self, step: Step) -> Tensor:
        features, _ = representation_and_answer(step.model, step.inputs)
        unit = F.normalize(features.float(), dim=1)
        logits = F.linear(unit, step.scratch[SCRATCH]["weight"])
        error = (logits - one_hot(step.targets, self.info.classes)).square().sum(1).mean()
        return self.settings.scale * error

    def collect(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Return Z^T Z and Z^T Y over the client's examples, in double precision."""
        sums: State = {}
        for features, labels in last_inputs(step, batches):
            unit = F.normalize(features, dim=1)
            target = one_hot(labels, self.info.classes).double()
            products = {GRAM: unit.t() @ unit, PRODUCTS: unit.t() @ target}
            sums = {name: tensor + sums.get(name, 0) for name, tensor in products.items()}
        return sums


class SphereFedServer(ServerAlgorithm):
    """FedAvg with a fixed last layer, and its calibration."""

    settings: SphereFedSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        self._layers = last_layers(info.split, settings.name)

    def init(self) -> State:
        own = {}
        for layer in self._layers.values():
            fixed = fixed_layer(self.info.seed, self.info.classes, layer.width)
            own[f"{OWN}{layer.weight}"] = fixed
        return own

    def post_process(
        self, own: State, state: State, updates: Sequence[ClientUpdate]
    ) -> tuple[State, dict[str, Tensor | float]]:
        """Return the global state with the fixed last layers, and without biases."""
        state = dict(state)
        for layer in self._layers.values():
            state[layer.weight] = own[f"{OWN}{layer.weight}"].clone()
            if layer.bias is not None:
                state[layer.bias] = torch.zeros_like(state[layer.bias])
        return state, {}

    def collection_clients(self, round_number: int) -> Sequence[int]:
        if not self.settings.calibrate:
            return ()
        due = is_calibration_due(self.info, self.settings.every, round_number)
        return range(len(self.info.sizes)) if due else ()

    def apply_collection(
        self, own: State, state: State, collections: Sequence[Collection]
    ) -> tuple[State, State]:
        state = dict(state)
        collections = finite(collections)
        for layer in dict.fromkeys(self._layers.values()):
            answers = []
            for collection in collections:
                if self._layers[collection.size] == layer:
                    answers.append(collection.values)
            if answers:
                gram = sum_of([answer[GRAM] for answer in answers], (layer.width, layer.width))
                shape = (layer.width, self.info.classes)
                products = sum_of([answer[PRODUCTS] for answer in answers], shape)
                solution = least_squares(gram, products, self.settings.ridge)
                state[layer.weight] = solution.t().to(state[layer.weight].dtype).contiguous()
        return own, state


def sum_of(tensors: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the sum of the clients' tensors in double precision, if they have the given shape."""
    for tensor in tensors:
        if tensor.shape != shape:
            raise ValueError(f"a tensor has shape {tuple(tensor.shape)}, not {shape}")
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)


def least_squares(gram: Tensor, products: Tensor, ridge: float) -> Tensor:
    """Return (gram + ridge)^-1 products; with a singular matrix, the shortest solution."""
    added = ridge * gram.diagonal().mean()
    unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.pinv(gram + added * unit, hermitian=True) @ products


@METHODS.register(
    "spherefed",
    "unit features for a fixed orthonormal last layer, calibrated at the end",
    paper="Dong et al., ECCV 2022",
)
class SphereFed(Method):
    """FedAvg, with a last layer that is not trained."""

    Settings = SphereFedSettings
    Client = SphereFedClient
    Server = SphereFedServer
    requirements = Requirements(
        own_training=True,
        own_loss=True,
        own_aggregation=True,
        collection=True,
        stages=True,
        classes=True,
        uses_total_rounds=True,
    )

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        for size, layer in last_layers(info.split, settings.name).items():
            if layer.width < info.classes:
                raise MotleyError(
                    f"model.sizes: {size!r} has {layer.width} features for {info.classes} classes; "
                    "method.name = 'spherefed' has one orthogonal direction per class, and needs "
                    "at least as many features as classes."
                )
