"""The `[training]` table: how a client trains, and the plan of one round that follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from motley.client.optimizers import CpuAdam, CpuSGD, Optimizer
from motley.client.weights import LossScale, Weights
from motley.core.part import by_type
from motley.core.randomness import generator
from motley.core.registry import Registry
from motley.data.device import DRAWS
from motley.settings import RegistryChoice, Settings

Momentum: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """The clients' optimizer. Its state starts anew in every round."""

    lasting = ()

    #: Whether there is one of Motley's kernels for it on a GPU.
    has_kernel: ClassVar[bool] = True
    #: Whether every coordinate is optimized independently of the others.
    elementwise: ClassVar[bool] = True

    name: str = "adam"
    """The clients' optimizer. Also the dotted path of a class of torch optimizers, such as
    "torch.optim:RMSprop".
    """
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the clients in round 1; see training.lr_decay and training.lr_milestones."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: decoupled with adamw, part of the gradient with adam and sgd."""

    @property
    def moments(self) -> int:
        """How many tensors of its size the optimizer keeps for each parameter."""
        raise NotImplementedError

    @property
    def sgd_momentum(self) -> float | None:
        """The momentum of SGD; None for other optimizers."""
        return None

    def build(
        self,
        parameters: Iterable[Tensor],
        device: torch.device,
        fused: bool = False,
        weights: Weights | None = None,
        scale: LossScale | None = None,
    ) -> Optimizer:
        """Return the optimizer.

        On a GPU a graph can capture its steps, and its learning rate is a tensor there. A fused
        optimizer reads the gradients of the parameters' 16-bit copies, and writes these copies.
        With a loss scale, steps with gradients that are not finite are skipped.
        """
        cuda = device.type == "cuda"
        lr: Any = torch.tensor(self.lr, device=device) if cuda else self.lr
        if fused:
            return self._build_fused(list(parameters), lr, weights, scale)
        parameters = list(parameters)
        one_type = len({parameter.dtype for parameter in parameters}) == 1
        if device.type == "cpu" and one_type and scale is None:
            return self._build_for_cpu(parameters)
        optimizer = self._build_of_torch(parameters, lr, cuda)
        if scale is not None:
            scale.guard(optimizer)
        return optimizer

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can contain its step."""
        return True

    def reset(self, optimizer: Optimizer, lr: float) -> None:
        """Let an optimizer start anew, with the learning rate of a round."""
        reset(optimizer, lr)

    def _build_of_torch(
        self, parameters: list[Tensor], lr: Any, cuda: bool
    ) -> torch.optim.Optimizer:
        raise NotImplementedError

    def _build_for_cpu(self, parameters: list[Tensor]) -> Optimizer:
        raise NotImplementedError

    def _build_fused(
        self, parameters: list[Tensor], lr: Any, weights: Weights | None, scale: LossScale | None
    ) -> torch.optim.Optimizer:
        raise NotImplementedError


class SGDSettings(OptimizerSettings):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    momentum: Momentum = 0.0
    """Momentum."""

    @property
    def sgd_momentum(self) -> float | None:
        """The momentum of SGD."""
        return self.momentum

    @property
    def moments(self) -> int:
        """One with momentum, none without."""
        return int(self.momentum > 0)

    def _build_for_cpu(self, parameters: list[Tensor]) -> Optimizer:
        return CpuSGD(parameters, self.lr, self.momentum, self.weight_decay)

    def _build_of_torch(
        self, parameters: list[Tensor], lr: Any, cuda: bool
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr, self.momentum, weight_decay=self.weight_decay, fused=True
        )

    def _build_fused(
        self, parameters: list[Tensor], lr: Any, weights: Weights | None, scale: LossScale | None
    ) -> torch.optim.Optimizer:
        from motley.kernels.optimizers import FusedSGD

        return FusedSGD(parameters, lr, self.momentum, self.weight_decay, weights, scale)


class AdamSettings(OptimizerSettings):
    """Adam and AdamW."""

    name: Literal["adam", "adamw"] = "adam"
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of the two moments."""

    @property
    def moments(self) -> int:
        """The first and the second moment."""
        return 2

    def _build_for_cpu(self, parameters: list[Tensor]) -> Optimizer:
        decoupled = self.name == "adamw"
        return CpuAdam(parameters, self.lr, self.betas, self.weight_decay, decoupled=decoupled)

    def _build_of_torch(
        self, parameters: list[Tensor], lr: Any, cuda: bool
    ) -> torch.optim.Optimizer:
        cls = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
        return cls(
            parameters, lr, self.betas, weight_decay=self.weight_decay, capturable=cuda, fused=True
        )

    def _build_fused(
        self, parameters: list[Tensor], lr: Any, weights: Weights | None, scale: LossScale | None
    ) -> torch.optim.Optimizer:
        from motley.kernels.optimizers import FusedAdam

        decoupled = self.name == "adamw"
        return FusedAdam(
            parameters, lr, self.betas, self.weight_decay, weights, scale, decoupled=decoupled
        )


OPTIMIZER_CLASSES: Registry[type[OptimizerSettings]] = Registry(
    "optimizer", group="motley.optimizers"
)
OPTIMIZER_CLASSES.register("adam", "Adam")(AdamSettings)
OPTIMIZER_CLASSES.register("adamw", "Adam with decoupled weight decay")(AdamSettings)
OPTIMIZER_CLASSES.register("sgd", "SGD, with or without momentum")(SGDSettings)
#: Chosen by training.optimizer.name.
OPTIMIZERS = RegistryChoice("adam", OPTIMIZER_CLASSES, lambda settings: settings, listed=True)


class TrainingSettings(Settings):
    """The number of rounds, and the clients' local training."""

    rounds: int = Field(default=20, ge=1)
    """Number of rounds. `motley resume RUN --rounds N` changes it for an existing run."""
    epochs: float = Field(default=1.0, gt=0)
    """Local epochs per round; fractions are allowed."""
    steps: int = Field(default=0, ge=0)
    """Local steps (batches) per round, instead of `epochs`; 0: use `epochs`."""
    batch_size: int = Field(default=32, ge=1)
    """Batch size of local training."""
    drop_last: bool = False
    """Drop the last, smaller batch of an epoch, unless it is the only one."""
    max_grad_norm: float = Field(default=0.0, ge=0)
    """Maximum norm of the gradient; 0: no clipping."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Weight that is spread evenly over all classes, in the clients' training loss only. The rest
    is on the example's class.
    """
    mixup: float = Field(default=0.0, ge=0, le=100)
    """Parameter of mixup: an input becomes w times itself plus (1 - w) times another input of its
    batch, and its loss the same mean of the losses for both targets; w is drawn for each batch
    from Beta(mixup, mixup). 0: off.
    """
    logit_adjustment: float = Field(default=0.0, ge=0, le=10)
    """Strength (tau) of logit adjustment, against clients with unequal shares of the classes: in
    the clients' training loss, tau log p is added to the logit of a class that has the share p of
    the client's examples. 1: balanced softmax. 0: off. Best without label smoothing, which it
    turns in favour of classes that the client does not have.
    """
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    """The learning rate of round t is lr * lr_decay ** (t - 1)."""
    lr_milestones: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Rounds after which the learning rate is multiplied by `lr_gamma`."""
    lr_gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor on the learning rate after each round of `lr_milestones`."""
    optimizer: Annotated[SerializeAsAny[OptimizerSettings], OPTIMIZERS] = AdamSettings()

    def lr(self, round_number: int) -> float:
        """Return the learning rate of a round (the first is 1)."""
        passed = sum(round_number > milestone for milestone in self.lr_milestones)
        return self.optimizer.lr * self.lr_decay ** (round_number - 1) * self.lr_gamma**passed

    def epoch_lengths(self, samples: int, smallest: int) -> list[int]:
        """Return the lengths of an epoch's batches, none of them shorter than `smallest`."""
        full, rest = divmod(samples, self.batch_size)
        lengths = [self.batch_size] * full
        dropped = self.drop_last and full > 0
        if rest and rest >= smallest and not dropped:
            lengths.append(rest)
        return lengths

    def local_steps(self, epoch_steps: int, extra_epochs: float = 0.0) -> int:
        """Return the number of steps in a round, given the number of steps in an epoch.

        `extra_epochs`: the method's (`Method.extra_epochs`).
        """
        if not epoch_steps:
            return 0
        steps = self.steps or max(1, round(self.epochs * epoch_steps))
        return steps + round(extra_epochs * epoch_steps)


def reset(optimizer: Optimizer, lr: float) -> None:
    """Let an optimizer start anew, in place: captured steps write into its tensors."""
    tensors: list[Tensor] = []
    for state in optimizer.state.values():
        tensors.extend(value for value in state.values() if isinstance(value, Tensor))
    for moments in by_type(tensors):
        if moments:
            torch._foreach_zero_(moments)
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


class Plan(NamedTuple):
    """One client's round: the examples of every batch, and random numbers for augmentation."""

    lengths: list[int]
    #: (steps, batch size); a shorter batch leaves the end of its row unused.
    rows: Tensor
    #: (steps, batch size, draws per example) numbers in [0, 1).
    draws: Tensor | None
    #: Steps of one epoch.
    epoch_steps: int = 0
    #: (steps,) the weight of an example's own input in mixup.
    mix: Tensor | None = None


#: The plan of a client that does not train.
NO_STEPS = Plan([], torch.zeros((0, 1), dtype=torch.long), None)


def make_plan(
    training: TrainingSettings,
    examples: np.ndarray,
    *,
    smallest: int,
    num_draws: int,
    seed: int,
    round_number: int,
    client: int,
    extra_epochs: float = 0.0,
) -> Plan:
    """Draw a client's batches for a round: a fresh permutation of its examples per epoch.

    `num_draws` random numbers per example are for its augmentation (`DeviceData.num_draws`).
    """
    epoch = training.epoch_lengths(len(examples), smallest)
    steps = training.local_steps(len(epoch), extra_epochs)
    lengths = [epoch[step % len(epoch)] for step in range(steps)]
    rows = np.zeros((steps, training.batch_size), dtype=np.int64)
    rng = generator(seed, "batches", round_number, client)
    for step, length in enumerate(lengths):
        if step % len(epoch) == 0:
            order = rng.permutation(examples)
        first = (step % len(epoch)) * training.batch_size
        rows[step, :length] = order[first : first + length]
    draws = None
    if num_draws:
        # Each group of numbers has its own key, so that the first one is the same with and without
        # the second.
        shape = (steps, training.batch_size, DRAWS)
        rng = generator(seed, "augmentation", round_number, client)
        draws = torch.from_numpy(rng.random(shape, dtype=np.float32))
        if num_draws > DRAWS:
            shape = (steps, training.batch_size, num_draws - DRAWS)
            rng = generator(seed, "more augmentation", round_number, client)
            more = torch.from_numpy(rng.random(shape, dtype=np.float32))
            draws = torch.cat([draws, more], dim=2)
    mix = None
    if training.mixup:
        rng = generator(seed, "mixup", round_number, client)
        weights = rng.beta(training.mixup, training.mixup, steps)
        mix = torch.from_numpy(weights.astype(np.float32))
    return Plan(lengths, torch.from_numpy(rows), draws, len(epoch), mix)
