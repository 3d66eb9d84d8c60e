"""One client in training: its model, its optimizer, and the `Step` that its algorithm sees.

All tensors stay in place for the learner's whole life. Loading a client copies its values into
them, and a step reads its batch by a counter on the device. So a step can be captured once as a
CUDA graph and replayed for any client of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from motley.client.batches import Batches
from motley.client.compilation import compilation, compile_model, no_compilation
from motley.client.fused import apply_kernels
from motley.client.job import Job
from motley.client.optimizers import Optimizer
from motley.client.training import Plan, TrainingSettings
from motley.client.training_loss import TrainingLoss
from motley.client.weights import Weights, working_type
from motley.core.async_copy import to_device
from motley.core.device import on_device, place, use_generator
from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.part import State, by_type
from motley.core.randomness import key
from motley.core.results import require_tensors
from motley.core.tensors import add_, difference, norms
from motley.data.device import DeviceData
from motley.kernels import AVAILABLE
from motley.methods.base import ClientAlgorithm
from motley.methods.step import Proximal
from motley.models.tied import names_for_a_call
from motley.tasks import Task

#: A forward function: from a model and a batch of inputs to outputs.
Forward: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


def shapes_of(*states: State) -> object:
    """Return a key for the names and shapes of states, whatever the order of their names."""
    shapes = []
    for state in states:
        shapes.append(tuple(sorted((name, tensor.shape) for name, tensor in state.items())))
    return tuple(shapes)


class _Group(NamedTuple):
    """Tensors of a model that have one type, as they are now and as the client received them."""

    names: list[str]
    live: list[Tensor]
    received: list[Tensor]


class _Forward(nn.Module):
    """A model with another forward function, because `functional_call` calls modules only."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.function = model, forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self.model, inputs)


@dataclass(frozen=True)
class _Proximal:
    """A proximal term that is not yet in the gradients."""

    mu: float | Mapping[str, float]
    center: State
    term: Proximal

    def strength(self, name: str) -> float:
        if name not in self.center:
            return 0.0
        return self.mu[name] if isinstance(self.mu, Mapping) else self.mu


@contextmanager
def _restored(groups: list[list[Tensor]]) -> Iterator[None]:
    """Restore tensors at the end of a block.

    They are restored behind autograd's back (`.data`), because it may keep some of them for a
    backward pass that is still to come, and does not need their values.
    """
    copies = []
    for group in groups:
        copy = [torch.empty_like(tensor) for tensor in group]
        torch._foreach_copy_(copy, group)
        copies.append(copy)
    yield
    for group, copy in zip(groups, copies, strict=True):
        torch._foreach_copy_([tensor.data for tensor in group], copy)


class Learner:
    """A model with everything that local training needs, used by one client at a time.

    It implements `motley.methods.step.Step`, which documents the names that algorithms use.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: ClientAlgorithm,
        training: TrainingSettings,
        data: DeviceData,
        *,
        longest: int,
        precision: str,
        kernels: Collection[str] = (),
        compiled: bool = False,
        lean: bool = False,
        task: Task,
        classes: int,
    ) -> None:
        """`kernels`: names of Motley's kernels to use on a GPU. `compiled`: compile the model."""
        device = data.device
        self._kernels = frozenset(kernels) if device.type == "cuda" and AVAILABLE else frozenset()
        self.model = apply_kernels(place(model, device).train(), self._kernels)
        self._compiled, self._classes = compiled, classes
        self._training_loss = TrainingLoss(task, training, classes, device)
        if compiled:
            compile_model(self.model)
        self.algorithm, self.training, self.data, self.device = algorithm, training, data, device
        #: Whether the model has layers that move the weights that `functional_call` lends them.
        self._moves_weights = device.type == "cuda" and any(
            isinstance(module, nn.RNNBase) for module in self.model.modules()
        )
        self.weights = Weights(self.model, precision)
        self._working_type = working_type(precision)
        #: The model's own tensors, which are rounded to 16 bits in fp16 and bf16.
        self._computing: State = self.model.state_dict()
        self._call_names = names_for_a_call(self.model)
        self.params: State = {n: tensor.detach() for n, tensor in self.weights.masters.items()}
        self.state: State = {n: self.params.get(n, t) for n, t in self._computing.items()}
        self.received: State = {n: torch.empty_like(tensor) for n, tensor in self.state.items()}
        buffers = by_type(tensor for name, tensor in self.state.items() if name not in self.params)
        self._buffers = [group for group in buffers if group]
        self._groups = self._grouped_by_type()
        #: Tensors for a broadcast, a client state and scratch values, by the shapes of the first
        #: two.
        self._rooms: dict[object, tuple[State, State, dict[str, State]]] = {}
        self.broadcast: State = {}
        self.client_state: State = {}
        self.scratch: dict[str, State] = {}
        self._proximal: _Proximal | None = None
        #: Whether the optimizer is ours: it reads gradients where `backward` leaves them, adds a
        #: proximal term on the way, and writes the model's 16-bit weights.
        self.fused_optimizer = "optimizer" in self._kernels
        self.optimizer = self._make_optimizer(self.weights.masters.values(), self.weights)
        self._optimizers: dict[tuple[str, ...], Optimizer] = {}
        self.lr: Tensor | float = self.optimizer.param_groups[0]["lr"]
        self.round = torch.zeros((), dtype=torch.long, device=device)
        self.lengths: list[int] = []
        self.batches = Batches(data, training.batch_size, longest, working_type(precision), lean)
        self.inputs = self.targets = self._no_batch = torch.zeros(0, dtype=self.batches.dtype)
        self._loss = torch.zeros((), device=device)
        self.num_steps = self.total_steps = self.epoch_steps = 0
        self.phase = 0
        self._seed = 0
        self.job: Job | None = None
        #: The rows of all examples of the client.
        self.rows = np.zeros(0, dtype=np.int64)
        self.generator = torch.Generator(device) if device.type == "cuda" else None

    def _grouped_by_type(self) -> list[_Group]:
        """Return the tensors of the model in groups, because grouped operations need one type."""
        floating: list[str] = []
        others: list[str] = []
        for name, tensor in self.state.items():
            (floating if tensor.is_floating_point() else others).append(name)
        groups = []
        for names in (floating, others):
            if names:
                live = [self.state[name] for name in names]
                groups.append(_Group(names, live, [self.received[name] for name in names]))
        return groups

    def _make_optimizer(
        self, tensors: Iterable[Tensor], weights: Weights | None = None
    ) -> Optimizer:
        fused, scale = self.fused_optimizer, self.weights.scale
        return self.training.optimizer.build(tensors, self.device, fused, weights, scale)

    # ---- a client's training, from its job to its result

    def hold(self, broadcast: State, client_state: State) -> None:
        """Make room for a broadcast and a client state of these shapes.

        The tensors are kept, because captured steps read and write them.
        """
        shapes = shapes_of(broadcast, client_state)
        if shapes not in self._rooms:
            self._rooms[shapes] = self._like(broadcast), self._like(client_state), {}
        self.broadcast, self.client_state, self.scratch = self._rooms[shapes]

    def _like(self, state: State) -> State:
        return {n: on_device(torch.zeros_like(t), self.device) for n, t in state.items()}

    def receive(self, state: State) -> None:
        """Copy a part into the model. Passes that need no method use this without `load`."""
        with torch.no_grad():
            for names, live, received in self._groups:
                values = [state[name] for name in names]
                torch._foreach_copy_(received, values)
                torch._foreach_copy_(live, values)
        self.sync()

    def load(self, job: Job, client_state: State, plan: Plan, seed: int) -> None:
        """Load a client: its part, broadcast, state and plan, with a fresh optimizer."""
        self.job, self.lengths, self.num_steps, self.phase = job, plan.lengths, 0, 0
        self.total_steps, self.epoch_steps = len(plan.lengths), plan.epoch_steps
        self._seed = seed
        self.hold(job.broadcast, client_state)
        self.receive(job.state)
        self._proximal = None
        self._copy_in(self.broadcast, job.broadcast)
        self._copy_in(self.client_state, client_state)
        for optimizer in (self.optimizer, *self._optimizers.values()):
            self.training.optimizer.reset(optimizer, self.training.lr(job.round_number))
        self.lr = self.optimizer.param_groups[0]["lr"]
        if self.weights.scale is not None:
            self.weights.scale.reset()
        self.batches.load(plan)
        self.round.fill_(job.round_number)
        self._loss.zero_()
        if not plan.lengths:
            return  # a collection or an evaluation
        if self._training_loss.needs_counts:
            self._training_loss.load(self.class_counts(self._classes))
        self.seed_training()
        self.use_generator()
        if self.generator is None:
            before_steps = key(seed, "before training", job.round_number, job.client)
            torch.random.default_generator.manual_seed(before_steps)
        with self.without_compilation():
            self.algorithm.before_training(self)

    def _copy_in(self, room: State, values: Mapping[str, Tensor]) -> None:
        """Copy tensors that may be in host memory, without waiting for the device."""
        if not room:
            return  # as in FedAvg, which has neither a broadcast nor a client state
        groups = zip(by_type(room.values()), by_type(values[name] for name in room), strict=True)
        with torch.no_grad():
            for into, given in groups:
                if into:
                    torch._foreach_copy_(into, given, non_blocking=True)

    @property
    def uses_kernels(self) -> bool:
        """Whether its steps may launch Motley's own kernels."""
        return bool(self._kernels)

    @property
    def finished(self) -> bool:
        """Whether the last step has been taken."""
        return self.num_steps == len(self.lengths)

    @property
    def round_number(self) -> int:
        """The round of the job."""
        assert self.job is not None
        return self.job.round_number

    @property
    def size(self) -> str:
        """The client's model size."""
        assert self.job is not None
        return self.job.size

    def seed_training(self) -> None:
        """Key the generator of a client's training on a GPU, where each learner has its own.

        Steps on different streams would otherwise race for the one seed that captured graphs read.
        """
        if self.generator is not None:
            self.generator.manual_seed(self._key())

    def seed_step(self) -> None:
        """Key torch's own CPU generator for the next step, because learners share it."""
        if self.generator is None:
            torch.random.default_generator.manual_seed(self._key(self.num_steps))

    def phase_of(self, step_number: int) -> int:
        """Return the phase of a step of the current client; the first step is number 0."""
        return self.algorithm.phase(self, step_number)

    def enter_phase(self) -> None:
        """Set the phase of the next step."""
        self.phase = self.phase_of(self.num_steps)

    def _key(self, *step: int) -> int:
        assert self.job is not None
        return key(self._seed, "step", self.job.round_number, self.job.client, *step)

    def use_generator(self) -> None:
        """Let torch's random functions on the learner's GPU draw from its generator."""
        use_generator(self.generator)

    def step(self, length: int) -> None:
        """Take the step that the counter on the device points at. This is what a graph captures.

        A compiled model is compiled for whole batches only. Every client's last batch may have a
        length of its own, and compiling takes longer than many steps, so short batches run as they
        would without compilation.
        """
        whole = length == self.training.batch_size
        with self._compilation() if whole else self.without_compilation():
            mix = self.batches.mix() if self.training.mixup else None
            inputs, self.targets = self.batches.next(length)
            self.inputs = self._training_loss.begin_batch(inputs, mix)
            self._loss.add_(self.algorithm.train_step(self).float())
        # Let go of the batch, so that a captured graph can use its memory again.
        self.inputs = self.targets = self._no_batch
        self._training_loss.end_batch()
        self.drop_gradients()

    def _compilation(self) -> AbstractContextManager[None]:
        return compilation() if self._compiled else nullcontext()

    def without_compilation(self) -> AbstractContextManager[None]:
        """Run the model uncompiled inside the block: only steps with whole batches are compiled."""
        return no_compilation() if self._compiled else nullcontext()

    @contextmanager
    def captured(self, steps: int) -> Iterator[None]:
        """Reserve memory in our own optimizers for a capture of some steps, and settle it after."""
        fused: list[Any] = []
        if self.fused_optimizer:
            fused = [self.optimizer, *self._optimizers.values()]
        for optimizer in fused:
            optimizer.reserve(steps)
        yield
        for optimizer in fused:
            optimizer.settle()

    def delta(self) -> State:
        """Return how far parameters and buffers are from the received ones."""
        differences: State = {}
        with torch.no_grad():
            for names, live, received in self._groups:
                differences.update(zip(names, torch._foreach_sub(live, received), strict=True))
        return {name: differences[name] for name in self.received}

    def result(self) -> tuple[State, State, Tensor]:
        """Return payload, next client state and summed loss, all on the device."""
        if self.num_steps:
            self._training_loss.check_used(self.algorithm.settings.name)
        self.seed_step()
        self.use_generator()
        with self.without_compilation():
            result: object = self.algorithm.finish(self)
        if not isinstance(result, tuple) or len(result) != 2:
            raise MotleyError(
                f"finish of {type(self.algorithm).__name__} returned {describe(result)}; a pair of "
                "the payload and the next client state is expected, two mappings of tensors."
            )
        finish = f"finish of {type(self.algorithm).__name__}"
        payload = require_tensors(result[0], finish, "payload")
        client_state = require_tensors(result[1], finish, "client state")
        return payload, client_state, self._loss.clone()

    def drop_moments(self) -> None:
        """Free the optimizer's state after the last step: the next client starts with a new one.

        Not for a GPU, where captured steps write into it.
        """
        for optimizer in (self.optimizer, *self._optimizers.values()):
            optimizer.state.clear()

    def drop_gradients(self) -> None:
        """Free the gradients of a step: the next forward pass, or the delta, takes their memory.

        On a GPU they stay: captured steps write into them.
        """
        if self.device.type == "cpu":
            for parameter in self.weights.masters.values():
                parameter.grad = None

    # ---- what an algorithm may use (`Step`)

    @property
    def grads(self) -> State:
        """The gradients of the last `backward`, plus the proximal terms added since."""
        self._add_proximal()
        return self.weights.gradients()

    def task_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the task's mean loss of a batch, see `Step.task_loss`."""
        return self._training_loss(logits, targets, own=targets is self.targets)

    def backward(self, loss: Tensor, names: Collection[str] | None = None) -> None:
        """Compute the gradients of a loss, see `Step.backward`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise MotleyError(_wrong_loss(type(self.algorithm).__name__, loss))
        self._proximal = None
        self.weights.backward(loss, names)
        if not self.fused_optimizer:
            self.weights.gather()

    def proximal(
        self,
        mu: float | Mapping[str, float],
        center: State | None = None,
        *,
        term: Proximal = "squared",
    ) -> None:
        """Add `mu * (params - center)` to the gradients, see `Step.proximal`.

        The term is added when somebody reads `grads`. If nobody does, our own optimizer adds it in
        the kernel that changes the parameters, which saves a pass over all of them.
        """
        self._add_proximal()
        strengths = mu.values() if isinstance(mu, Mapping) else [mu]
        if any(strengths):
            self._proximal = _Proximal(mu, self.received if center is None else center, term)

    def _add_proximal(self) -> None:
        """Add the proximal term to the gradients, if there is one."""
        proximal, self._proximal = self._proximal, None
        if proximal is None:
            return
        # d, the gradient of |d|^2 / 2
        gradients = difference(self.params, proximal.center)
        if proximal.term == "norms":
            # d / (2 |d|), the gradient of |d| / 2
            lengths = list(norms(gradients).values())
            _divide_by_lengths(gradients, torch._foreach_mul(lengths, 2.0))
        elif proximal.term == "norm-of-squares":
            # d^3 / |d * d|, the gradient of |d * d| / 2
            offsets = list(gradients.values())
            squares = torch._foreach_mul(offsets, offsets)
            torch._foreach_mul_(offsets, squares)
            _divide_by_lengths(gradients, torch._foreach_norm(squares))
        add_(self.weights.gradients(), gradients, proximal.mu)

    def optimize(self, names: Iterable[str] | None = None, *, clip: bool = False) -> None:
        """Clip the gradients if the run asks for it, and take the optimizer's step."""
        if names is not None:
            chosen = tuple(names)
            self._add_proximal()
            self.weights.gather()
            if clip and self.training.max_grad_norm:
                masters = [self.weights.masters[name] for name in chosen]
                nn.utils.clip_grad_norm_(masters, self.training.max_grad_norm)
            self._optimizer_of(chosen).step()
            self.sync()
            return
        proximal, clipped = self._proximal, self.training.max_grad_norm
        squared = proximal is not None and proximal.term == "squared"
        if proximal is not None and squared and self.fused_optimizer and not clipped:
            # A name that is not in the center has no term; any tensor of its shape will do there.
            center = [proximal.center.get(name, self.received[name]) for name in self.params]
            strengths = [proximal.strength(name) for name in self.params]
            self.optimizer.pull(center, strengths)  # type: ignore[union-attr]
            self._proximal = None
        self._add_proximal()
        if clipped:
            self.weights.gather()
            nn.utils.clip_grad_norm_(self.weights.masters.values(), clipped)
        self.optimizer.step()
        if not self.fused_optimizer:
            self.sync()

    def _optimizer_of(self, names: tuple[str, ...]) -> Optimizer:
        """Return an optimizer for some parameters, which starts anew with every client."""
        if names not in self._optimizers:
            chosen = [self.weights.masters[name] for name in names]
            self._optimizers[names] = self._make_optimizer(chosen)
            lr = self.training.lr(self.round_number)
            self.training.optimizer.reset(self._optimizers[names], lr)
        return self._optimizers[names]

    def sync(self) -> None:
        """Let the model compute with `params` as they are now."""
        self.weights.sync()

    @contextmanager
    def preserve_weights(self) -> Iterator[None]:
        """Restore parameters and buffers at the end of a block; gradients stay."""
        self._add_proximal()
        with _restored([list(self.params.values()), *self._buffers]):
            yield
        self.sync()

    @contextmanager
    def preserve_buffers(self) -> Iterator[None]:
        """Restore buffers at the end of a block."""
        with _restored(self._buffers):
            yield

    def frozen(self, state: State, inputs: Tensor, forward: Forward | None = None) -> Tensor:
        """Return the output of this architecture with another state, without gradients."""
        if self._moves_weights:
            raise MotleyError(
                f"method.name = {self.algorithm.settings.name!r}: runs the model with the weights "
                "of another round, and on a GPU torch's recurrent layers (nn.LSTM, nn.GRU, nn.RNN) "
                "move such weights in memory. Use motley.models.lstm.LSTMLayer, or a CPU."
            )
        module = _Forward(self.model, forward or _call)
        self.model.eval()
        try:
            with torch.no_grad(), self.without_compilation():
                given = self._in_model_types(state)
                own = {f"model.{name}": given[first] for name, first in self._call_names.items()}
                output: Tensor = functional_call(module, own, (inputs,), tie_weights=False)
        finally:
            self.model.train()
        return output

    def _in_model_types(self, state: State) -> State:
        """Return a state in the types that the model computes with; one grouped copy if they
        differ.
        """
        own = {name: state[name] for name in self._computing}
        wanted = {n: t for n, t in self._computing.items() if t.dtype != own[n].dtype}
        if wanted:
            cast = [torch.empty_like(tensor) for tensor in wanted.values()]
            torch._foreach_copy_(cast, [own[name] for name in wanted])
            own.update(zip(wanted, cast, strict=True))
        return own

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into `scratch[name]`, which stays in place."""
        room = self.scratch.setdefault(name, {})
        for tensor_name, value in tensors.items():
            if tensor_name not in room:
                room[tensor_name] = on_device(torch.empty_like(value), self.device)
        self._copy_in({tensor_name: room[tensor_name] for tensor_name in tensors}, tensors)

    def as_inputs(self, images: Tensor) -> Tensor:
        """Return images in the type in which the model computes."""
        return images.to(self.batches.dtype)

    def as_features(self, features: Tensor) -> Tensor:
        """Return activations in the type in which the model computes."""
        return features.to(self._working_type)

    def first_inputs(self, count: int) -> Tensor:
        """Return the client's first `count` inputs of this round, as it trained on them."""
        return self.batches.first(count, self.lengths)

    def class_counts(self, num_classes: int) -> Tensor:
        """Return how many examples the client has of each class."""
        targets = self.data.targets[to_device(torch.from_numpy(self.rows), self.device)]
        # Not torch.bincount, which waits for a GPU.
        zeros = torch.zeros(num_classes, device=self.device)
        return zeros.index_add_(0, targets, torch.ones_like(targets, dtype=zeros.dtype))

    # ---- collections

    def examples(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a plan's batches without augmentation and in single precision, for a collection."""
        rows = to_device(plan.rows, self.device)
        for step, length in enumerate(plan.lengths):
            yield self.data.batch(rows[step, :length])


def _wrong_loss(algorithm: str, loss: object) -> str:
    """Return the message about a loss of a method, usually a user's own, that has no gradient."""
    if not isinstance(loss, Tensor):
        problem = f"is {describe(loss)}"
    elif loss.numel() != 1:
        problem = f"has the shape {tuple(loss.shape)}"
    else:
        problem = "does not depend on any parameter that is trained"
    return (
        f"the loss of {algorithm} {problem}; a tensor with the mean loss of the batch, computed "
        "from the model's outputs, is expected."
    )


def _divide_by_lengths(tensors: State, lengths: tuple[Tensor, ...]) -> None:
    """Divide each tensor by its length, in place.

    Before the first step, parameters and center are the same. Their distance is zero, and so is
    the gradient.
    """
    tiny = torch.finfo(lengths[0].dtype).tiny
    torch._foreach_div_(list(tensors.values()), torch._foreach_clamp_min(lengths, tiny))


def _call(model: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = model(inputs)
    return output
