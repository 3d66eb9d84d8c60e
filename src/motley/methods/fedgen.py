"""FedGen: a generator of features, taught by the clients' heads, teaches all clients.

Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML
2021. A model is cut before its head. After a round the server trains a generator G(y, noise) of
features on the heads of the round's clients, so that each head recognizes the labels that its
client has (Eq. 4):

    sum over clients k of  share_k(y) * cross-entropy(head_k(G(y, noise)), y)  +  diversity

where share_k(y) is the client's share of the round's examples of y, and a diversity term keeps G
from ignoring its noise. The generator goes out with the next broadcast, and a client minimizes

    cross-entropy(model(x), y)
    + alpha * cross-entropy(head(G(y', noise)), y')                  y' of any class
    + beta * KL(softmax(head(G(y, noise))) || softmax(model(x)))     the first without gradient

In the first round there is no generator yet, and it is FedAvg's.

The paper and its released code differ: Eq. 4 has the cross-entropy of the clients' mean logits
(`teacher = "logits"`), and normal noise. The defaults here are the code's, for its largest
generator. The code adds one to every count of labels, and drops the added terms after 20 local
epochs; both are left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, vmap

from motley.core.errors import MotleyError
from motley.core.part import State, take
from motley.core.randomness import key
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
from motley.methods.fedgen_generator import (
    PARAMETERS,
    STATISTICS,
    Sizes,
    TeacherLoss,
    Training,
    generate,
    initial,
    train,
)
from motley.methods.info import FederationInfo
from motley.methods.labels import one_hot
from motley.methods.step import Step
from motley.models.stages import chain_of, owned, run, shape_behind

#: Prefix of the method's tensors in a broadcast and in the server's state.
OWN = "generator/"
#: In a payload: examples per class, and the means of the two added losses over the client's steps.
COUNTS = "counts"
GENERATED_LOSS, DISTILLATION_LOSS = f"{REPORTED}generated_loss", f"{REPORTED}distillation_loss"
#: Where the client half keeps its counts, the weights of the added losses, and their sums.
SCRATCH = "fedgen"
#: The weights of the added losses do not fall below this number.
SMALLEST_WEIGHT = 1e-4


class FedGenSettings(MethodSettings):
    """FedGen's own settings."""

    name: str = "fedgen"
    alpha: float = Field(default=10.0, ge=0)
    """Initial weight of the cross-entropy on generated features; 0: none."""
    beta: float = Field(default=10.0, ge=0)
    """Initial weight of the KL divergence from the predictions on generated features of the same
    labels; 0: none. The released code has 10, and 1 for EMNIST. With alpha = beta = 0 this is
    FedAvg.
    """
    decay: float = Field(default=0.98, gt=0, le=1)
    """Factor on both weights in every round. They stay above 0.0001."""
    batch: int = Field(default=0, ge=0)
    """Number of generated features per step; 0: the training batch size. The weight alpha is
    multiplied by their number per example of a batch.
    """
    noise: Literal["uniform", "normal"] = "uniform"
    """The generator's noise: uniform between 0 and 1, as in the released code, or normal."""
    noise_width: int = Field(default=64, ge=1)
    """Length of the noise vector."""
    hidden: int = Field(default=512, ge=1)
    """Width of the generator's hidden layer."""
    generator_steps: int = Field(default=50, ge=1)
    """Steps that the generator trains for in every round."""
    generator_batch: int = Field(default=0, ge=0)
    """Batch size of the generator's training; 0: the training batch size."""
    generator_lr: float = Field(default=3e-4, gt=0)
    """The generator's learning rate, with Adam. The released code has 0.0003, and 0.0001 for
    EMNIST.
    """
    generator_lr_decay: float = Field(default=0.98, gt=0, le=1)
    """Factor on the generator's learning rate after every round."""
    generator_weight_decay: float = Field(default=1e-2, ge=0)
    """The generator's weight decay, added to its gradient."""
    diversity: float = Field(default=1.0, ge=0)
    """Weight of the generator's diversity loss."""
    teacher: Literal["losses", "logits"] = "losses"
    """The generator's loss. losses: the sum of the clients' cross-entropies, weighted by their
    shares of the label (released code). logits: the cross-entropy of the clients' mean logits (Eq.
    4).
    """

    @property
    def active(self) -> bool:
        """Whether clients use the generator."""
        return self.alpha > 0 or self.beta > 0

    def weight_at(self, weight: float, round_number: int) -> float:
        """Return the weight of an added loss in a round."""
        return max(SMALLEST_WEIGHT, weight * self.decay ** (round_number - 1))

    def draw_noise(
        self, count: int, device: torch.device, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the generator's noise for some features, with torch's own random generator or a
        given one.
        """
        draw = torch.rand if self.noise == "uniform" else torch.randn
        return draw((count, self.noise_width), device=device, generator=generator)


class FedGenClient(ClientAlgorithm):
    """FedAvg, and two losses on generated features."""

    settings: FedGenSettings

    def before_training(self, step: Step) -> None:
        settings, number = self.settings, step.round_number
        step.keep(
            SCRATCH,
            {
                "counts": torch.zeros(self.info.classes),
                "alpha": torch.tensor(settings.weight_at(settings.alpha, number)),
                "beta": torch.tensor(settings.weight_at(settings.beta, number)),
                "generated_loss": torch.zeros(()),
                "distillation_loss": torch.zeros(()),
            },
        )

    def loss(self, step: Step) -> Tensor:
        *body, head = chain_of(step.model)
        features = run(body, step.inputs)
        logits = head.run(features)
        loss = step.task_loss(logits, step.targets)
        own = step.scratch[SCRATCH]
        own["counts"].add_(one_hot(step.targets, self.info.classes).sum(0))
        if not step.broadcast:
            return loss
        if self.settings.alpha:
            count = self.settings.batch or self.info.training.batch_size
            labels = torch.randint(self.info.classes, (count,), device=step.targets.device)
            generated_logits = head.run(self._features(step, labels).to(features.dtype))
            generated_loss = step.task_loss(generated_logits, labels)
            own["generated_loss"].add_(generated_loss.detach())
            ratio = count / self.info.training.batch_size
            loss = loss + ratio * own["alpha"] * generated_loss
        if self.settings.beta:
            with torch.no_grad():
                target_logits = head.run(self._features(step, step.targets).to(features.dtype))
                target = target_logits.float().softmax(1)
            predicted = logits.float().log_softmax(1)
            distillation_loss = F.kl_div(predicted, target, reduction="batchmean")
            own["distillation_loss"].add_(distillation_loss.detach())
            loss = loss + own["beta"] * distillation_loss
        return loss

    def _features(self, step: Step, labels: Tensor) -> Tensor:
        weights = {name.removeprefix(OWN): t for name, t in step.broadcast.items()}
        noise = self.settings.draw_noise(len(labels), labels.device)
        return generate(weights, labels, noise)

    def finish(self, step: Step) -> tuple[State, State]:
        if not self.settings.active:
            return {}, {}
        own = step.scratch[SCRATCH]
        payload = {COUNTS: own["counts"].clone()}
        if step.broadcast and self.settings.alpha:
            payload[GENERATED_LOSS] = own["generated_loss"] / step.num_steps
        if step.broadcast and self.settings.beta:
            payload[DISTILLATION_LOSS] = own["distillation_loss"] / step.num_steps
        return payload, {}


class FedGenServer(ServerAlgorithm):
    """FedAvg, and the training of the generator."""

    settings: FedGenSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        size = info.split.sizes[0]
        module = info.split.blueprints[size].module
        self._head = _Head(deepcopy(module).eval())
        self._head_names = owned(module, chain_of(module)[-1:])
        self._width = shape_behind(module, -1, info.input_shape).numel()

    def init(self) -> State:
        if not self.settings.active:
            return {}
        settings = self.settings
        sizes = Sizes(self.info.classes, settings.noise_width, settings.hidden, self._width)
        own = initial(sizes, self.info.seed)
        for name in PARAMETERS:
            own[f"first/{name}"] = torch.zeros_like(own[name])
            own[f"second/{name}"] = torch.zeros_like(own[name])
        own["steps"] = torch.zeros(())
        own["teacher_loss"] = torch.zeros(())
        return {f"{OWN}{name}": tensor for name, tensor in own.items()}

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        if round_number == 1 or not self.settings.active:
            return {}
        return {f"{OWN}{name}": own[f"{OWN}{name}"] for name in (*PARAMETERS, *STATISTICS)}

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Train the generator on the heads with which the round's clients ended."""
        if not self.settings.active:
            return own
        updates = sorted(updates, key=lambda update: update.client)
        counts = torch.stack([self._counts(update) for update in updates])
        teacher_loss = self._teacher_loss(counts, self._heads(state, updates))
        numbers = torch.Generator(counts.device)
        numbers.manual_seed(key(self.info.seed, "generator", updates[0].round_number))
        trained = train(
            {name.removeprefix(OWN): tensor for name, tensor in own.items()},
            counts.sum(0),
            teacher_loss,
            self._training(counts.device),
            numbers,
        )
        return {f"{OWN}{name}": tensor for name, tensor in trained.items()}

    def metrics(self, own: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return the numbers that clients reported, and the loss of the generator's teachers."""
        numbers = super().metrics(own, updates)
        if self.settings.active:
            numbers["teacher_loss"] = own[f"{OWN}teacher_loss"]
        return numbers

    def _counts(self, update: ClientUpdate) -> Tensor:
        counts = update.payload[COUNTS]
        if counts.shape != (self.info.classes,):
            raise ValueError(f"{COUNTS!r} has shape {tuple(counts.shape)}")
        return counts.clamp_min(0)

    def _heads(self, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the heads of all clients, stacked: each parameter has one row per client."""
        heads: dict[str, list[Tensor]] = {name: [] for name in self._head_names}
        for update in updates:
            received = take(state, {name: update.part[name] for name in self._head_names})
            for name in self._head_names:
                heads[name].append(received[name] + update.delta[name])
        return {name: torch.stack(tensors) for name, tensors in heads.items()}

    def _teacher_loss(self, counts: Tensor, heads: State) -> TeacherLoss:
        """Return the teachers' loss, given each client's number of examples per class."""
        shares = counts / counts.sum(0).clamp_min(1)

        def logits_of(head: State, features: Tensor) -> Tensor:
            parameters = {f"model.{name}": tensor for name, tensor in head.items()}
            logits: Tensor = functional_call(self._head, parameters, (features,))
            return logits

        def teacher_loss(labels: Tensor, features: Tensor) -> Tensor:
            # (clients, examples, classes)
            logits = vmap(logits_of, in_dims=(0, None))(heads, features)
            if self.settings.teacher == "logits":
                return F.cross_entropy(logits.mean(0), labels)
            repeated = labels.expand(len(logits), -1)
            losses = F.cross_entropy(logits.flatten(0, 1), repeated.flatten(), reduction="none")
            return (shares[:, labels] * losses.view(repeated.shape)).sum(0).mean()

        return teacher_loss

    def _training(self, device: torch.device) -> Training:
        settings = self.settings

        def noise(count: int, generator: torch.Generator) -> Tensor:
            return settings.draw_noise(count, device, generator)

        return Training(
            steps=settings.generator_steps,
            batch=settings.generator_batch or self.info.training.batch_size,
            lr=settings.generator_lr,
            lr_decay=settings.generator_lr_decay,
            weight_decay=settings.generator_weight_decay,
            diversity=settings.diversity,
            noise=noise,
        )


class _Head(nn.Module):
    """The head of a model as a module, because `functional_call` calls modules only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        return chain_of(self.model)[-1].run(features)


@METHODS.register(
    "fedgen",
    "a generator of features, taught by all heads, teaches all clients",
    paper="Zhu et al., ICML 2021",
)
class FedGen(Method):
    """FedAvg, with a generator between the clients."""

    Settings = FedGenSettings
    Client = FedGenClient
    Server = FedGenServer
    requirements = Requirements(
        payload=True, own_training=True, own_aggregation=True, stages=True, classes=True
    )

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        expected: dict[str, torch.Size] = {}
        first = info.split.sizes[0]
        for size, blueprint in info.split.blueprints.items():
            chain = chain_of(blueprint.module)
            state = blueprint.module.state_dict()
            head = {name: state[name].shape for name in owned(blueprint.module, chain[-1:])}
            head["features"] = shape_behind(blueprint.module, -1, info.input_shape)
            if len(head["features"]) != 1:
                raise MotleyError(
                    f"model.sizes: the head of {size!r} reads features of shape "
                    f"{tuple(head['features'])}; method.name = 'fedgen' generates vectors."
                )
            expected = expected or head
            if head != expected:
                raise MotleyError(
                    f"model.sizes: {first!r} and {size!r} have different heads "
                    f"({_described(expected)} against {_described(head)}), and method.name = "
                    "'fedgen' has one generator for the heads of all sizes. Use sizes that differ "
                    "in depth only."
                )


def _described(shapes: dict[str, torch.Size]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
