"""Distillation at the server, for FedDF and Fed-ET: clients' models teach sizes on public images.

Three steps, each a function:

- `draw_batches`: the public images of every server step, keyed by the seed and the round.
- `client_logits`: the logits of the round's clients. Public images are not augmented, so a client's
  logits of an image do not change during the steps. Each image is passed through each client's
  model once, however often the steps use it.
- `train_sizes`: some sizes learn by gradient steps on the public images.

**Sizes that share parts are trained together.** The parameters that are trained are those of the
global state. In each step every size computes its loss with its own part of them, and the gradients
of all sizes are added up before the optimizer changes the parameters once. Training the sizes one
after the other would let the last one overwrite the layers that it shares with the others. If sizes
share nothing (`grouped`), both are the same: the optimizers here treat every coordinate by itself,
and gradients are clipped per size.

**BatchNorm.** Models compute in evaluation mode, without dropout. With `statistics = "frozen"`, the
students too: they normalize with the averaged running statistics, which stay as they are. With
"adapt", as in FedDF's code, students normalize with public batches, and their running statistics
move towards the public images. That is a trap if those look unlike the clients' images: the
statistics then belong to another data set.

Nothing is read from the device between the first and the last step, so a GPU need not wait.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from motley.core.async_copy import to_device
from motley.core.device import place
from motley.core.part import Part, State, take
from motley.core.randomness import generator
from motley.core.tensors import add_, norm, scale_, total
from motley.core.update import ClientUpdate
from motley.data.public import PublicData
from motley.splits.base import Split, is_described_by_its_state

#: Public images that pass through a client's model at once.
TEACHER_BATCH = 1000

Statistics: TypeAlias = Literal["frozen", "adapt"]
#: (logits of a batch, positions of its images among the distinct ones) -> the loss.
BatchLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


# ---- the images of the steps


@dataclass(frozen=True)
class PublicBatches:
    """The public images of every server step.

    rows: for every step the rows of its images (steps, batch).
    distinct: all rows that occur, each once.
    positions: the place of each entry of `rows` in `distinct` (steps, batch).
    """

    rows: Tensor
    distinct: Tensor
    positions: Tensor


def draw_batches(
    images: int, steps: int, batch_size: int, seed: int, round_number: int, device: torch.device
) -> PublicBatches:
    """Draw the images of a round's steps: passes over all images, each in a new random order."""
    batch_size = min(batch_size, images)
    numbers = generator(seed, "distillation", round_number)
    passes = math.ceil(steps * batch_size / images)
    order = np.concatenate([numbers.permutation(images) for _ in range(passes)])
    rows = order[: steps * batch_size].reshape(steps, batch_size)
    distinct, positions = np.unique(rows, return_inverse=True)

    def placed(array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), device)

    return PublicBatches(placed(rows), placed(distinct), placed(positions.reshape(rows.shape)))


# ---- models at the server


class ServerModels:
    """One module per size, copied when it is first used. Tensors are passed in with every call.

    So a module needs no memory for tensors of its own: it stays on torch's meta device, and a GPU
    need not wait for a copy. Only models that keep tensors outside of their state are really built.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._modules: dict[str, nn.Module] = {}
        self._norms: dict[str, list[nn.Module]] = {}

    def logits(
        self, size: str, state: State, images: Tensor, *, adapt_statistics: bool = False
    ) -> Tensor:
        """Return the logits of a size with these parameters and buffers, in evaluation mode.

        With `adapt_statistics`, BatchNorm normalizes with the batch and changes the running
        statistics in `state` in place.
        """
        if size not in self._modules:
            blueprint = self._split.blueprints[size].module
            if is_described_by_its_state(blueprint):
                module = copy.deepcopy(blueprint)
            else:
                module = place(self._split.build(size), images.device)
            self._modules[size] = module.eval()
            self._norms[size] = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        for layer in self._norms[size]:
            layer.train(adapt_statistics)
        logits: Tensor = functional_call(self._modules[size], state, (images,))
        return logits


@torch.no_grad()
def client_logits(
    models: ServerModels, updates: Sequence[ClientUpdate], public: PublicData, rows: Tensor
) -> Tensor:
    """Return the logits of every client's trained model on some public rows.

    The shape is (clients, rows, classes). Clients are in the order of their ids, so that the result
    does not depend on who finished first.
    """
    logits = []
    for update in sorted(updates, key=lambda update: update.client):
        trained = total(update.received, update.delta)
        batches = []
        for batch in rows.split(TEACHER_BATCH):
            batches.append(models.logits(update.size, trained, public.images(batch)))
        logits.append(torch.cat(batches))
    return torch.stack(logits).float()


# ---- training


class Optimizer(Protocol):
    """Changes parameters in place."""

    def step(self, params: State, grads: State, lr: float) -> None:
        """Take one step on the parameters that have a gradient."""
        ...


class Adam:
    """Adam (Kingma and Ba, 2015), with all tensors in grouped calls.

    torch's class gives the same numbers, and imports torch's compiler when it is first used.
    """

    BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

    def __init__(self) -> None:
        self._first: State = {}
        self._second: State = {}
        self._steps = 0

    def step(self, params: State, grads: State, lr: float) -> None:
        """Take one step. The same names must have gradients in every step."""
        self._steps += 1
        for name, grad in grads.items():
            if name not in self._first:
                self._first[name] = torch.zeros_like(grad)
                self._second[name] = torch.zeros_like(grad)
        names = list(grads)
        given = [grads[name] for name in names]
        first = [self._first[name] for name in names]
        second = [self._second[name] for name in names]
        torch._foreach_lerp_(first, given, 1 - self.BETA1)
        torch._foreach_mul_(second, self.BETA2)
        torch._foreach_addcmul_(second, given, given, 1 - self.BETA2)
        scale = math.sqrt(1 - self.BETA2**self._steps)
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, scale)
        torch._foreach_add_(divisors, self.EPS)
        step_size = lr / (1 - self.BETA1**self._steps)
        torch._foreach_addcdiv_([params[name] for name in names], first, divisors, -step_size)


class SGD:
    """SGD with momentum, as torch defines it: buf = momentum buf + g; p -= lr buf."""

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._buffers: State = {}

    def step(self, params: State, grads: State, lr: float) -> None:
        """Take one step."""
        for name, grad in grads.items():
            if name not in self._buffers:
                self._buffers[name] = torch.zeros_like(grad)
        scale_(self._buffers, self._momentum)
        add_(self._buffers, grads)
        add_(params, {name: self._buffers[name] for name in grads}, -lr)


def cosine(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, which falls from `lr` to 0 along a half cosine."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def train_sizes(
    models: ServerModels,
    state: State,
    parts: Mapping[str, Part],
    parameters: frozenset[str],
    public: PublicData,
    batches: PublicBatches,
    loss: BatchLoss,
    optimizer: Optimizer,
    rates: Sequence[float],
    *,
    max_norm: float | Literal["off"] = "off",
    statistics: Statistics = "frozen",
) -> State:
    """Train some sizes together on public images, and return the global state after it.

    `parts` has the part of each size that is trained, `parameters` the global names of parameters,
    `rates` the learning rate of each step. Gradients of a size are clipped to `max_norm`.
    """
    adapt = statistics == "adapt"
    trained: State = {}
    buffers: State = {}
    for part in parts.values():
        for piece in part.values():
            tensor = state[piece.name]
            if piece.name in parameters:
                trained.setdefault(piece.name, tensor.detach().clone().requires_grad_())
            elif adapt:
                # A copy, because BatchNorm changes its statistics in place.
                buffers.setdefault(piece.name, tensor.clone())
    current = {**state, **buffers, **trained}
    for rows, positions, lr in zip(batches.rows, batches.positions, rates, strict=True):
        images = public.images(rows)
        grads: State = {}
        for size, part in parts.items():
            logits = models.logits(size, take(current, part), images, adapt_statistics=adapt)
            names = list(dict.fromkeys(p.name for p in part.values() if p.name in trained))
            of_size = gradients(loss(logits.float(), positions), trained, names)
            if max_norm != "off":
                scale_(of_size, (max_norm / (norm(of_size) + 1e-6)).clamp(max=1.0))
            for name, grad in of_size.items():
                grads[name] = grads[name] + grad if name in grads else grad
        with torch.no_grad():
            optimizer.step(trained, grads, lr)
    return {**state, **buffers, **{name: tensor.detach() for name, tensor in trained.items()}}


def gradients(loss: Tensor, params: State, names: Sequence[str]) -> State:
    """Return the gradients of a loss for the parameters that it depends on."""
    grads = torch.autograd.grad(loss, [params[name] for name in names], allow_unused=True)
    return {n: grad for n, grad in zip(names, grads, strict=True) if grad is not None}


# ---- losses


def kl_divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)) of every example, from logits.

    The factor T^2 keeps the size of the gradients when T changes (Hinton et al., 2015).
    """
    targets = F.log_softmax(teacher / temperature, dim=1)
    predictions = F.log_softmax(student / temperature, dim=1)
    divergence = F.kl_div(predictions, targets, reduction="none", log_target=True).sum(1)
    return temperature**2 * divergence
