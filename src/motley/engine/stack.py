"""Clients side by side: one model with a leading client dimension, so that one step trains all of
them.

A small model's step is bound by the number of operations, not by arithmetic, and a stack of fifty
clients needs as many operations as one client. Clients do not influence each other: the gradient of
the sum of their losses is the gradient of each, and optimizers work coordinate by coordinate. Short
batches are padded with examples of weight zero.

Sums are taken in another order than for one client, and random numbers in a step (dropout) are
drawn for all clients at once, so `engine.vmap_clients` changes results. These train in slots
instead: models with buffers (batch norm) or recurrent layers, methods with their own local training
or with clients that keep their own models or private tensors, clipped gradients, and users' own
optimizers; on a CPU also convolutions, which are three times slower side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from motley.client.clients import Clients
from motley.client.job import Job
from motley.client.training import Plan
from motley.client.weights import TYPES
from motley.core.async_copy import tensor_on, to_device
from motley.core.device import use_generator
from motley.core.graphs import capture
from motley.core.part import State
from motley.core.randomness import key
from motley.core.update import ClientUpdate
from motley.models.inputs import dims_of, input_dtype
from motley.models.lstm import LSTMLayer
from motley.models.tied import second_names

#: Eager steps before a capture.
WARM_UP = 3


def can_stack(clients: Clients, size: str) -> bool:
    """Tell whether clients of a size can train side by side with their method, and gain by it."""
    needs = clients.method.requirements
    if needs.own_training or needs.client_state or needs.payload or not needs.exchanges_weights:
        return False
    if clients.method.info.split.private[size]:
        return False
    training = clients.training
    if training.max_grad_norm or training.mixup or training.logit_adjustment:
        return False
    if clients.precision in TYPES:
        return False
    if not training.optimizer.elementwise:
        return False
    module = clients.method.info.split.blueprints[size].module
    if any(True for _ in module.buffers()) or second_names(module):
        return False
    if any(isinstance(layer, nn.RNNBase | LSTMLayer) for layer in module.modules()):
        return False  # torch has no batching rule for recurrent layers
    convolutions = any(isinstance(layer, nn.Conv1d | nn.Conv2d) for layer in module.modules())
    return clients.device.type == "cuda" or not convolutions


class Stack:
    """Trains several clients of one size at once; on a GPU their common step is captured once."""

    def __init__(self, clients: Clients, size: str, width: int) -> None:
        self.clients, self.size, self.width = clients, size, width
        device, training, data = clients.device, clients.training, clients.data
        self.task = clients.training_task
        model = clients.method.info.split.build(size).to(device).train()
        unfold_convolutions(model)
        self._logits = vmap(
            lambda state, inputs: functional_call(model, state, (inputs,)), randomness="different"
        )
        self.start: State = {
            name: torch.empty((width, *tensor.shape), device=device)
            for name, tensor in model.named_parameters()
        }
        self.weights: State = {
            name: torch.empty_like(tensor).requires_grad_() for name, tensor in self.start.items()
        }
        self.optimizer = training.optimizer.build(self.weights.values(), device)
        self.losses = torch.zeros(width, device=device)
        batch = (width, training.batch_size)
        #: Inputs, targets and shares of a captured step.
        self._rooms = (
            torch.zeros(
                (*batch, *dims_of(data.shape)),
                dtype=input_dtype(data.shape, torch.float32),
                device=device,
            ),
            torch.zeros((*batch, *data.targets.shape[1:]), dtype=data.targets.dtype, device=device),
            torch.zeros(batch, device=device),
        )
        self._generator = torch.Generator(device) if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def train(self, jobs: Sequence[Job]) -> list[ClientUpdate]:
        """Train clients of this size. If they are fewer than the stack is wide, the other rows
        idle.
        """
        plans = [self.clients.plan(job) for job in jobs]
        counts = [len(plan.lengths) for plan in plans]
        with self._on_stream():
            batches = Batches(self.clients, plans, self.width)
            if self._stream is not None and self._graph is None:
                self._load(jobs)
                self._capture(batches)
            self._load(jobs)
            aside: list[tuple[Tensor, State]] = []
            for step in range(max(counts)):
                self._seed(jobs[0], step)
                self._step(*batches.of(step))
                ended = [row for row, count in enumerate(counts) if count == step + 1 < max(counts)]
                if ended:
                    rows = tensor_on(ended, torch.long, self.clients.device)
                    weights = {}
                    for name, tensor in self.weights.items():
                        weights[name] = tensor.detach().index_select(0, rows)
                    aside.append((rows, weights))
            return self._updates(jobs, counts, aside)

    @torch.no_grad()
    def _load(self, jobs: Sequence[Job]) -> None:
        """Copy every client's part to its row, and the first client's to rows that idle."""
        jobs = [*jobs, *[jobs[0]] * (self.width - len(jobs))]
        for name, start in self.start.items():
            torch.stack([job.state[name] for job in jobs], out=start)
            self.weights[name].copy_(start)
        training = self.clients.training
        training.optimizer.reset(self.optimizer, training.lr(jobs[0].round_number))
        self.losses.zero_()

    def _step(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> None:
        """Take a step; `shares` is the weight of each example in its client's mean loss."""
        if self._graph is None:
            self._compute(inputs, targets, shares)
            return
        for room, values in zip(self._rooms, (inputs, targets, shares), strict=True):
            room.copy_(values)
        self._graph.replay()

    def _compute(self, inputs: Tensor, targets: Tensor, shares: Tensor) -> None:
        with self._attention():
            logits = self._logits(self.weights, inputs)
        errors = self.task.example_losses(logits.flatten(0, 1), targets.flatten(0, 1))
        losses = (errors.view_as(shares) * shares).sum(1)
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()
        self.losses += losses.detach()

    def _attention(self) -> AbstractContextManager[object]:
        """Let attention be computed by its formula.

        On a CPU, vmap knows no rule for the fused one and would run it client by client. On a GPU
        its backward pass fails with the additional dimension ("LSE is not correctly aligned").
        """
        # Imported here, because it takes a node that never stacks clients tens of megabytes.
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.MATH)

    def _capture(self, batches: Batches) -> None:
        """Capture a step. The changed weights are overwritten by the next load."""
        for room, values in zip(self._rooms, batches.of(0), strict=True):
            room.copy_(values)
        use_generator(self._generator)
        for _ in range(WARM_UP):
            self._compute(*self._rooms)
        torch.cuda.synchronize(self.clients.device)
        graph = torch.cuda.CUDAGraph()
        assert self._stream is not None
        with capture(graph, self._stream):
            self._compute(*self._rooms)
        self._graph = graph

    def _seed(self, first: Job, step: int) -> None:
        """Key the random numbers of a step, or of the whole training if it is captured."""
        if self._generator is None:
            torch.random.default_generator.manual_seed(self._key(first, step))
        elif step == 0:
            self._generator.manual_seed(self._key(first))

    def _key(self, first: Job, *step: int) -> int:
        return key(self.clients.seed, "stack", first.round_number, first.client, *step)

    @torch.no_grad()
    def _updates(
        self, jobs: Sequence[Job], counts: list[int], aside: list[tuple[Tensor, State]]
    ) -> list[ClientUpdate]:
        for rows, state in aside:
            for name, tensor in state.items():
                self.weights[name].detach().index_copy_(0, rows, tensor)
        deltas = {
            name: (self.weights[name].detach() - start).unbind()
            for name, start in self.start.items()
        }
        losses = self.losses.clone().unbind()
        updates = []
        for row, job in enumerate(jobs):
            delta = {name: rows[row] for name, rows in deltas.items()}
            updates.append(self.clients.update(job, delta, {}, {}, losses[row], counts[row]))
        return updates

    def follow(self) -> None:
        """Let the stack's stream wait for the server's work so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.clients.device))

    def lead(self) -> None:
        """Let the server's stream wait for the stack's work so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.clients.device).wait_stream(self._stream)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


class Batches:
    """The batches of several plans, one step at a time."""

    def __init__(self, clients: Clients, plans: Sequence[Plan], width: int) -> None:
        self.data = clients.data
        steps, size = max(len(plan.lengths) for plan in plans), clients.training.batch_size
        rows = np.zeros((steps, width, size), dtype=np.int64)
        lengths = np.zeros((steps, width), dtype=np.int64)
        draws = None
        if self.data.random:
            draws = np.zeros((steps, width, size, self.data.num_draws), dtype=np.float32)
        for row, plan in enumerate(plans):
            rows[: len(plan.lengths), row] = plan.rows
            lengths[: len(plan.lengths), row] = plan.lengths
            if draws is not None and plan.draws is not None:
                draws[: len(plan.lengths), row] = plan.draws
        shares = (np.arange(size) < lengths[..., None]) / np.maximum(lengths, 1)[..., None]
        device = self.data.device
        #: Examples of each step that are computed: a captured step has one shape.
        self._longest = lengths.max(1) if device.type == "cpu" else np.full(steps, size)
        self._rows = to_device(torch.from_numpy(rows), device)
        self._shares = to_device(torch.from_numpy(shares.astype(np.float32)), device)
        self._draws = to_device(torch.from_numpy(draws), device) if draws is not None else None

    def of(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a step's inputs and targets (clients, batch size, ...) and each example's weight
        in its mean.
        """
        longest = int(self._longest[step])
        rows, shares = self._rows[step, :, :longest], self._shares[step, :, :longest]
        draws = self._draws[step, :, :longest].flatten(0, 1) if self._draws is not None else None
        inputs, targets = self.data.batch(rows.flatten(), draws)
        return inputs.unflatten(0, rows.shape), targets.unflatten(0, rows.shape), shares


class UnfoldedConvolution(nn.Module):
    """A convolution as one matrix product, with the tensors of a plain one.

    cuDNN has nothing better for weights that differ from client to client.
    """

    def __init__(self, original: nn.Conv2d) -> None:
        super().__init__()
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.padding = original.padding
        self.weight = original.weight
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        (high, wide), (down, across) = self.kernel_size, self.stride
        assert not isinstance(self.padding, str)
        top, left = self.padding
        windows = F.pad(x, (left, left, top, top)).unfold(2, high, down).unfold(3, wide, across)
        count, _, height, width = windows.shape[:4]
        columns = windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        y = columns @ self.weight.flatten(1).t()
        if self.bias is not None:
            y = y + self.bias
        return y.view(count, height, width, -1).permute(0, 3, 1, 2)


def unfold_convolutions(model: nn.Module) -> None:
    """Replace a model's plain convolutions, in place, by ones that compute as matrix products."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and _is_plain(child):
                setattr(parent, name, UnfoldedConvolution(child))


def _is_plain(convolution: nn.Conv2d) -> bool:
    zeros_around = convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
    return zeros_around and convolution.groups == 1 and convolution.dilation == (1, 1)
