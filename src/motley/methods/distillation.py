"""Distillation at the server, for FedDF and Fed-ET: clients' models teach sizes on public images.

Three steps:

- `draw_batches`: the public images of every server step, keyed by the seed and the round.
- `client_logits`: the logits of the round's clients. Public images are not augmented, so a client's
  logits of an image do not change during the steps. Each image is passed through each client's
  model once, however often the steps use it.
- `SizeTrainer`: some sizes learn by gradient steps on the public images.

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

Nothing is read from the device between the first and the last step, so the host never waits. On a
GPU, the forward and backward pass of a size is one captured graph.
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
from motley.core.graphs import capture
from motley.core.part import Part, State, take
from motley.core.randomness import generator
from motley.core.tensors import add_, copy_, norm, scale_, total
from motley.core.update import ClientUpdate
from motley.data.public import PublicData
from motley.models.tied import names_for_a_call
from motley.splits.base import Split, is_described_by_its_state

#: Public images that pass through a client's model at once.
TEACHER_BATCH = 1000

Statistics: TypeAlias = Literal["frozen", "adapt"]
#: (logits of a batch, targets of its images) -> the loss.
BatchLoss: TypeAlias = Callable[[Tensor, State], Tensor]


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
    rng = generator(seed, "distillation", round_number)
    passes = math.ceil(steps * batch_size / images)
    order = np.concatenate([rng.permutation(images) for _ in range(passes)])
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
        self._call_names: dict[str, Mapping[str, str]] = {}

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
            self._call_names[size] = names_for_a_call(module)
            self._norms[size] = [
                layer for layer in module.modules() if isinstance(layer, _BatchNorm)
            ]
        for layer in self._norms[size]:
            layer.train(adapt_statistics)
        own = {name: state[first] for name, first in self._call_names[size].items()}
        module = self._modules[size]
        logits: Tensor = functional_call(module, own, (images,), tie_weights=False)
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
        received = update.received
        # Integers (counters of BatchNorm) are left out, so that all tensors are added in one call.
        weights = {name: t for name, t in received.items() if t.is_floating_point()}
        trained = {**received, **total(weights, update.delta)}
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


class SizeTrainer:
    """Trains sizes together on public images, by gradient steps on the global parameters.

    `loss` gets the logits of a batch and the targets of its images, and depends on nothing else: on
    a GPU it is captured with a size's forward and backward pass as a CUDA graph, which is replayed
    in every step and round. Gradients of a size are clipped to `max_norm`.
    """

    def __init__(
        self,
        models: ServerModels,
        parameters: frozenset[str],
        loss: BatchLoss,
        *,
        max_norm: float | Literal["off"] = "off",
        statistics: Statistics = "frozen",
    ) -> None:
        """`parameters` are the global names of parameters; all other tensors are buffers."""
        self._models, self._parameters, self._loss = models, parameters, loss
        self._max_norm, self._adapt = max_norm, statistics == "adapt"
        #: The global tensors that sizes compute with, by name. On a GPU they stay in place, because
        #: captured graphs read and write them.
        self._tensors: State = {}
        self._graphs: dict[object, _CapturedStep] = {}

    def train(
        self,
        state: State,
        parts: Mapping[str, Part],
        public: PublicData,
        batches: PublicBatches,
        targets: State,
        optimizer: Optimizer,
        rates: Sequence[float],
    ) -> tuple[State, Tensor]:
        """Train the sizes that have a part in `parts`.

        `targets` has tensors with one row per distinct public image, `rates` the learning rate of
        each step. Returns the global state after it, and the mean loss over steps and sizes.
        """
        names: set[str] = set()
        for part in parts.values():
            names.update(piece.name for piece in part.values())
        self._load({name: tensor for name, tensor in state.items() if name in names})
        sum_of_losses = torch.zeros((), device=batches.rows.device)
        for rows, positions, lr in zip(batches.rows, batches.positions, rates, strict=True):
            images = public.images(rows)
            batch_targets = {name: tensor[positions] for name, tensor in targets.items()}
            grads: State = {}
            for size, part in parts.items():
                loss, of_size = self._loss_and_gradients(size, part, images, batch_targets)
                sum_of_losses += loss
                grads = {**grads, **of_size, **total(grads, of_size)}
            with torch.no_grad():
                optimizer.step(self._tensors, grads, lr)
        trained = {}
        for name in names:
            if name in self._parameters or self._adapt:
                trained[name] = self._tensors[name].detach().clone()
        if not self._graphs:
            self._tensors = {}  # no graph uses them, so they need not stay in memory
        return {**state, **trained}, sum_of_losses / (len(rates) * len(parts))

    @torch.no_grad()
    def _load(self, values: State) -> None:
        """Copy global tensors to where the sizes compute with them."""
        for name, tensor in values.items():
            if name not in self._tensors:
                room = torch.empty_like(tensor)
                self._tensors[name] = room.requires_grad_(name in self._parameters)
        copy_({name: self._tensors[name] for name in values}, values)

    def _loss_and_gradients(
        self, size: str, part: Part, images: Tensor, targets: State
    ) -> tuple[Tensor, State]:
        """Return a size's loss and its clipped gradients, by global names."""
        is_whole = all(piece.index is None for piece in part.values())
        if not images.is_cuda or not is_whole:
            return self._computed(size, part, images, targets)
        # Shapes decide which graph fits. The part of a size with whole tensors never changes.
        key = (size, images.shape, tuple(targets))
        if key not in self._graphs:
            buffers = [t for name, t in self._tensors.items() if name not in self._parameters]
            self._graphs[key] = _CapturedStep(
                lambda *batch: self._computed(size, part, *batch),
                images,
                targets,
                buffers if self._adapt else [],
            )
        return self._graphs[key](images, targets)

    def _computed(
        self, size: str, part: Part, images: Tensor, targets: State
    ) -> tuple[Tensor, State]:
        own = take(self._tensors, part)
        logits = self._models.logits(size, own, images, adapt_statistics=self._adapt)
        loss = self._loss(logits.float(), targets)
        names_of_part = dict.fromkeys(piece.name for piece in part.values())
        names = [name for name in names_of_part if name in self._parameters]
        params = [self._tensors[name] for name in names]
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        of_size = {n: grad for n, grad in zip(names, grads, strict=True) if grad is not None}
        if self._max_norm != "off":
            scale_(of_size, (self._max_norm / (norm(of_size) + 1e-6)).clamp(max=1.0))
        return loss.detach(), of_size


class _CapturedStep:
    """A function of images and targets that returns a loss and gradients, as a CUDA graph."""

    #: Calls before the capture: libraries choose algorithms and allocate workspaces in them.
    WARM_UP = 2

    def __init__(
        self,
        function: Callable[[Tensor, State], tuple[Tensor, State]],
        images: Tensor,
        targets: State,
        changed: Sequence[Tensor],
    ) -> None:
        """`changed` are the tensors that the function changes in place."""
        self._images = torch.empty_like(images)
        self._targets = {name: torch.empty_like(tensor) for name, tensor in targets.items()}
        self._copy_in(images, targets)
        before = [tensor.clone() for tensor in changed]
        stream = torch.cuda.Stream(images.device)
        stream.wait_stream(torch.cuda.current_stream(images.device))
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UP):
                function(self._images, self._targets)
        torch.cuda.current_stream(images.device).wait_stream(stream)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        self._graph = torch.cuda.CUDAGraph()
        with capture(self._graph, stream):
            self._results = function(self._images, self._targets)

    def __call__(self, images: Tensor, targets: State) -> tuple[Tensor, State]:
        """Return the results for a batch. The next call overwrites them."""
        self._copy_in(images, targets)
        self._graph.replay()
        return self._results

    def _copy_in(self, images: Tensor, targets: State) -> None:
        self._images.copy_(images)
        for name, tensor in targets.items():
            self._targets[name].copy_(tensor)


# ---- losses


def kl_divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)) of every example, from logits.

    The factor T^2 keeps the size of the gradients when T changes (Hinton et al., 2015).
    """
    targets = F.log_softmax(teacher / temperature, dim=1)
    predictions = F.log_softmax(student / temperature, dim=1)
    divergence = F.kl_div(predictions, targets, reduction="none", log_target=True).sum(1)
    return temperature**2 * divergence
