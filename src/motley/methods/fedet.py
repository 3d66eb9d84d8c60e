"""Fed-ET: the ensemble of client models trains a large model at the server, on public images.

Cho, Manoel, Joshi, Sim, Dimitriadis, Heterogeneous Ensemble Knowledge Transfer for Training Large
Models in Federated Learning, IJCAI 2022. Clients train small models as in FedAvg, and the server
averages them per architecture. With z_k(x) the logits of client k on a public image x:

    a_k(x) = Var(z_k(x)) / sum_j Var(z_j(x))         the variance is over classes: confidence
    y(x)   = argmax sum_k a_k(x) z_k(x)              the consensus, a hard label
    d(x)   = the same weighted mean over the clients whose argmax is not y(x), with weights that
             are normalized over them                the diversity
    minimize  CE(z(x), y(x)) + diversity KL(softmax(d(x)) || softmax(z(x)))

over the large model z. An image on which all clients agree has no d(x), and its second term is 0.
(Public code that leaves the mask out pulls the model towards the uniform distribution there.)

**The server's model is the largest size.** Motley has no model beside the sizes, so the size with
the most parameters is the server's, as when FedIN compares with Fed-ET on five ResNets. If clients
hold this size too, their average is its starting point in each round, and they are in the ensemble.

**The head is exchanged.** The paper has a representation layer of one width in all models. Here
this is the head: its tensors that have one shape in all sizes, among them the classifier. Before
the server's training, the largest size's head becomes the mean over the round's clients of all
sizes. After it, the head is copied to every other size. With `model.projection`, models of
different widths have heads of a common shape.

The paper's split is `grouped` (`FedET` among the papers' names). Over `depth`, the layers that
smaller sizes share with the largest one are trained with it, and the head is one already.

The authors have published no code; the defaults are those of public reimplementations. With
`method.steps = 0` only the averages and the exchange of heads remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings, Requirements, ServerAlgorithm
from motley.methods.distillation import (
    SGD,
    ServerModels,
    SizeTrainer,
    Statistics,
    client_logits,
    draw_batches,
    kl_divergence,
)
from motley.methods.info import FederationInfo
from motley.models.facts import InferenceError, classifiers_of, head_of
from motley.settings import Limit
from motley.splits.base import Split


class FedETSettings(MethodSettings):
    """Fed-ET's own settings: the training of the largest size at the server."""

    name: str = "fedet"
    steps: int = Field(default=128, ge=0)
    """Server steps per round. 0: averages per size, and one head for all sizes."""
    batch_size: int = Field(default=64, ge=1)
    """Public images per step."""
    lr: float = Field(default=0.005, gt=0)
    """The server's learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """The server's SGD momentum; its buffers start anew in every round."""
    diversity: float = Field(default=0.05, ge=0)
    """Weight of the diversity term (lambda in the paper)."""
    max_grad_norm: Limit = "off"
    """Bound on the norm of the server model's gradient."""
    statistics: Statistics = "frozen"
    """BatchNorm in the server's model. frozen: the averaged running statistics, which do not
    change. adapt: it normalizes with public batches, and its running statistics follow the public
    images.
    """


@dataclass(frozen=True)
class Consensus:
    """An ensemble's training targets for each image.

    labels: the class of the weighted mean logits (images).
    diversity: the weighted mean logits of the clients that disagree (images, classes).
    disputed: 1 for images on which some client disagrees, and 0 for the others (images).
    """

    labels: Tensor
    diversity: Tensor
    disputed: Tensor


def consensus(logits: Tensor) -> Consensus:
    """Return the consensus of clients' logits (clients, images, classes)."""
    variance = logits.var(dim=2, correction=0)
    labels = _weighted_mean(logits, variance).argmax(1)
    disagrees = logits.argmax(2) != labels
    variance_of_dissent = variance * disagrees
    diversity = _weighted_mean(logits, variance_of_dissent)
    disputed = (variance_of_dissent.sum(0) > 0).float()
    return Consensus(labels, diversity, disputed)


def _weighted_mean(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over clients with one weight per client and image; 0 if all weights are 0."""
    sums = weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return ((weights / sums)[:, :, None] * logits).sum(0)


def transfer_loss(logits: Tensor, teacher: Consensus, diversity: float) -> Tensor:
    """Return CE + diversity KL of a batch, given the consensus on its images."""
    loss = F.cross_entropy(logits, teacher.labels)
    divergence = kl_divergence(teacher.diversity, logits)
    return loss + diversity * (teacher.disputed * divergence).mean()


def shared_head(split: Split) -> dict[str, list[str]]:
    """Return the names of the head's exchanged tensors in every size, in one order.

    These are the tensors of the head that have the same shape in all sizes. A single size has
    nothing to exchange.
    """
    if len(split.sizes) == 1:
        return {split.sizes[0]: []}
    tensors_of: dict[str, dict[str, Tensor]] = {}
    classifiers: set[str] = set()
    for size, blueprint in split.blueprints.items():
        try:
            prefix = f"{head_of(blueprint.module)}."
        except InferenceError as error:
            raise MotleyError(
                f"method.name = 'fedet': {size!r} declares no head, which Fed-ET exchanges between "
                "sizes. Declare ModelSpec.head, or use split.name = 'grouped' or 'depth'. "
                f"It cannot be inferred: {error}"
            ) from error
        tensors = blueprint.module.state_dict()
        tensors_of[size] = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        for classifier in classifiers_of(blueprint.module):
            classifiers.add(f"{classifier}.weight".removeprefix(prefix))
    first, *others = tensors_of.values()
    exchanged = []
    for name, tensor in first.items():
        if all(name in other and other[name].shape == tensor.shape for other in others):
            exchanged.append(name)
    if not classifiers <= set(exchanged):
        raise MotleyError(
            f"method.name = 'fedet': the classifiers of {', '.join(split.sizes)} have different "
            "shapes, and Fed-ET exchanges them between sizes. Set model.projection, which gives "
            "all sizes a last layer of one width."
        )
    paths = {}
    for size, blueprint in split.blueprints.items():
        head = head_of(blueprint.module)
        paths[size] = [f"{head}.{name}" for name in exchanged]
    return paths


class FedETServer(ServerAlgorithm):
    """FedAvg per size, and an ensemble that trains the largest size."""

    settings: FedETSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        self._models = ServerModels(info.split)
        self._server_size = info.split.smallest_first[-1]
        self._head = shared_head(info.split)
        self._trainer = SizeTrainer(
            self._models,
            info.split.parameters,
            self._loss,
            max_norm=self.settings.max_grad_norm,
            statistics=self.settings.statistics,
        )

    def _loss(self, logits: Tensor, targets: State) -> Tensor:
        return transfer_loss(logits, Consensus(**targets), self.settings.diversity)

    def post_process(
        self, own: State, state: State, updates: Sequence[ClientUpdate]
    ) -> tuple[State, dict[str, Tensor | float]]:
        round_number = updates[0].round_number
        state = self._with_mean_head(state, updates, round_number)
        metrics: dict[str, Tensor | float] = {}
        if self.settings.steps:
            state, metrics = self._trained(state, updates, round_number)
        return self._with_server_head(state, round_number), metrics

    def _head_names(self, size: str, round_number: int) -> list[str]:
        """Return the global names of the head's exchanged tensors of a size."""
        part = self.info.split.evaluated(size, round_number)
        return [part[name].name for name in self._head[size]]

    def _with_mean_head(
        self, state: State, updates: Sequence[ClientUpdate], round_number: int
    ) -> State:
        """Give the server's size the mean head of the round's clients.

        A size's head is already the mean over its own clients, so it counts with their weight.
        """
        weights: dict[str, float] = {}
        for update in updates:
            weights[update.size] = weights.get(update.size, 0.0) + update.weight
        total_weight = sum(weights.values())
        after = dict(state)
        names_of = {size: self._head_names(size, round_number) for size in weights}
        for at, name in enumerate(self._head_names(self._server_size, round_number)):
            if {names[at] for names in names_of.values()} == {name}:
                continue  # all clients share this tensor, so it is their mean
            mean = torch.zeros_like(state[name])
            for size, names in names_of.items():
                mean.add_(state[names[at]], alpha=weights[size] / total_weight)
            after[name] = mean
        return after

    def _with_server_head(self, state: State, round_number: int) -> State:
        """Copy the head of the server's size to every other size."""
        after = dict(state)
        source = self._head_names(self._server_size, round_number)
        for size in self.info.split.sizes:
            for name, target in zip(source, self._head_names(size, round_number), strict=True):
                if target != name:
                    after[target] = state[name].clone()
        return after

    def _trained(
        self, state: State, updates: Sequence[ClientUpdate], round_number: int
    ) -> tuple[State, dict[str, Tensor | float]]:
        """Train the server's size; also return the mean loss and the share of disputed images."""
        settings, public, split = self.settings, self.info.public, self.info.split
        assert public is not None
        device = next(iter(state.values())).device
        batches = draw_batches(
            len(public), settings.steps, settings.batch_size, self.info.seed, round_number, device
        )
        teacher = consensus(client_logits(self._models, updates, public, batches.distinct))
        state, loss = self._trainer.train(
            state,
            {self._server_size: split.evaluated(self._server_size, round_number)},
            public,
            batches,
            vars(teacher),
            SGD(settings.momentum),
            [settings.lr] * settings.steps,
        )
        return state, {"distillation_loss": loss, "disputed": teacher.disputed.mean()}


@METHODS.register(
    "fedet",
    "the clients' weighted consensus trains the largest size at the server",
    paper="Cho et al., IJCAI 2022",
)
class FedET(Method):
    """FedAvg per size, with ensemble transfer into the largest size."""

    Settings = FedETSettings
    Server = FedETServer
    requirements = Requirements(
        own_aggregation=True, classes=True, mixed_classes=True, public_data=True
    )
