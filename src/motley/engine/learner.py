"""A client while it trains: its model, its optimiser, and every tensor that a method's client hooks may use.

All tensors stay where they are for the learner's whole life. A turn copies a client's values into them, and a step
reads its batch by a counter on the device; that is what lets a step be captured once as a CUDA graph and replayed for
any client of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from motley.core.part import State, by_type
from motley.core.randomness import key
from motley.data.device import DeviceData
from motley.engine.base import Job
from motley.engine.batches import Batches
from motley.engine.compilation import compilation, compile_model, no_compilation
from motley.engine.device import on_device, place, use_generator
from motley.engine.fused import apply_kernels
from motley.engine.optimizers import Optimizer
from motley.engine.training import Plan, TrainingSettings, reset
from motley.engine.weights import Weights, working_type
from motley.kernels import AVAILABLE
from motley.methods.base import Method


def shapes_of(*states: State) -> object:
    """Return what tells messages and memories of one shape from those of another, whatever the order of their names."""
    return tuple(tuple(sorted((name, tuple(tensor.shape)) for name, tensor in state.items())) for state in states)


Ask = Callable[[nn.Module, Tensor], Tensor]
"""What is computed with a model and a batch of images."""


class _Asked(nn.Module):
    """A model as a function that need not be its own `forward`."""

    def __init__(self, model: nn.Module, ask: Ask) -> None:
        super().__init__()
        self.model, self.ask = model, ask

    def forward(self, images: Tensor) -> Tensor:
        return self.ask(self.model, images)


@contextmanager
def _restored(groups: list[list[Tensor]]) -> Iterator[None]:
    """Put tensors back after a block. What autograd keeps of them for a backward still to come does not mind."""
    kept = [[torch.empty_like(tensor) for tensor in group] for group in groups]
    for room, group in zip(kept, groups, strict=True):
        torch._foreach_copy_(room, group)
    yield
    for group, room in zip(groups, kept, strict=True):
        torch._foreach_copy_([tensor.data for tensor in group], room)


class Learner:
    """A model with everything a turn needs, used by one client at a time."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        training: TrainingSettings,
        data: DeviceData,
        *,
        longest: int,
        precision: str,
        kernels: Collection[str] = (),
        compiled: bool = False,
        lean: bool = False,
    ) -> None:
        """`kernels`: the names of Motley's kernels to use on a GPU. `compiled`: compile the model."""
        device = data.device
        self.model = place(model, device).train()
        self._kernels = frozenset(kernels) if device.type == "cuda" and AVAILABLE else frozenset()
        apply_kernels(self.model, self._kernels)
        self._compiled = compiled
        if compiled:
            compile_model(self.model)
        self.method, self.training, self.data, self.device = method, training, data, device
        self.weights = Weights(self.model, precision)
        self.parameters = self.weights.masters
        self._computing: State = self.model.state_dict()
        self.tensors: State = {n: self.parameters.get(n, tensor) for n, tensor in self._computing.items()}
        """Parameters and buffers: the live part."""
        self.start: State = {name: torch.empty_like(tensor.detach()) for name, tensor in self.tensors.items()}
        """The part as it was received; frozen during the turn."""
        self.trained = [parameter.detach() for parameter in self.parameters.values()]
        """The parameters as plain tensors, to be changed in place; `anchors` and `gradients` are in the same order."""
        self.anchors = self.in_order(self.start)
        buffers = by_type(tensor for name, tensor in self.tensors.items() if name not in self.parameters)
        self._buffers = [group for group in buffers if group]
        self._starts = by_type(self.start.values())
        self._lives = by_type(tensor.detach() for tensor in self.tensors.values())
        self._rooms: dict[object, tuple[State, State, State]] = {}
        self.message: State = {}
        self.memory: State = {}
        self.notes: State = {}
        """What a method keeps for the length of a turn; see `note`."""
        self.optimizer = self._optimizer(self.parameters.values(), self.weights)
        self.publishes = "optimizer" in self._kernels
        """Whether the optimiser reads gradients where they lie, and its step is seen by the model without `publish`."""
        self._optimizers: dict[tuple[str, ...], Optimizer] = {}
        self.lr: Tensor | float = self.optimizer.param_groups[0]["lr"]
        self.round = torch.zeros((), dtype=torch.long, device=device)
        self.samples = torch.zeros((), dtype=torch.long, device=device)
        self.lengths: list[int] = []
        self.batches = Batches(data, training.batch_size, longest, working_type(precision), lean)
        self._loss = torch.zeros((), device=device)
        self.taken = 0
        self._seed = 0
        self.job: Job | None = None
        self.owned = np.zeros(0, dtype=np.int64)
        """The examples of the client, all of them."""
        self.generator = torch.Generator(device) if device.type == "cuda" else None

    def _optimizer(self, tensors: Iterable[Tensor], weights: Weights | None = None) -> Optimizer:
        fused = "optimizer" in self._kernels
        return self.training.optimizer.build(tensors, self.device, fused, weights, self.weights.scale)

    # ---- a turn

    def hold(self, message: State, memory: State) -> None:
        """Take the room for a message and a memory of these shapes. Rooms are kept: captured steps write into them."""
        shapes = shapes_of(message, memory)
        if shapes not in self._rooms:
            self._rooms[shapes] = self._room(message), self._room(memory), {}
        self.message, self.memory, self.notes = self._rooms[shapes]

    def _room(self, given: State) -> State:
        return {name: on_device(torch.zeros_like(tensor), self.device) for name, tensor in given.items()}

    def receive(self, state: State) -> None:
        """Copy a part into the model. On its own, without `load`, for passes that need nothing of the method."""
        with torch.no_grad():
            received = by_type(state[name] for name in self.start)
            for start, live, values in zip(self._starts, self._lives, received, strict=True):
                if values:
                    torch._foreach_copy_(start, values)
                    torch._foreach_copy_(live, values)
        self.publish()

    def load(self, job: Job, memory: State, plan: Plan, seed: int, samples: int) -> None:
        """Take a client's seat: its part, message, memory and plan, with a fresh optimiser."""
        self.job, self.lengths, self.taken = job, plan.lengths, 0
        self._seed = seed
        self.hold(job.broadcast, memory)
        self.receive(job.state)
        with torch.no_grad():
            for room, given in ((self.message, job.broadcast), (self.memory, memory)):
                for into, values in zip(by_type(room.values()), by_type(given[name] for name in room), strict=True):
                    if into:
                        torch._foreach_copy_(into, values, non_blocking=True)
        for optimizer in (self.optimizer, *self._optimizers.values()):
            reset(optimizer, self.training.lr(job.round_number))
        self.lr = self.optimizer.param_groups[0]["lr"]
        if self.weights.scale is not None:
            self.weights.scale.reset()
        self.batches.load(plan)
        self.round.fill_(job.round_number)
        self.samples.fill_(samples)
        self._loss.zero_()
        self.seed_turn()
        with self.without_compilation():
            self.method.before_training(self)

    @property
    def finished(self) -> bool:
        """Whether the turn's last step has been taken."""
        return self.taken == len(self.lengths)

    def seed_turn(self) -> None:
        """Key the generator of a turn on a GPU, where each learner has a generator state of its own.

        Steps on different streams would otherwise race for the one seed that captured graphs read.
        """
        if self.generator is not None:
            self.generator.manual_seed(self._key())

    def seed_step(self) -> None:
        """Key torch's own CPU generator for the next step: learners take turns with it."""
        if self.generator is None:
            torch.random.default_generator.manual_seed(self._key(self.taken))

    def _key(self, *step: int) -> int:
        assert self.job is not None
        return key(self._seed, "step", self.job.round_number, self.job.client, *step)

    def use_generator(self) -> None:
        """Make this learner's generator state the one that torch's random functions on its GPU draw from."""
        use_generator(self.generator)

    def step(self, length: int) -> None:
        """Take the step that the counter on the device points at. This is what a graph captures.

        A compiled model is compiled for whole batches only. Every client's last batch may have a length of its own, and
        compiling takes longer than many steps, so short batches run as they would without compilation.
        """
        whole = length == self.training.batch_size
        with self._compilation() if whole else self.without_compilation():
            images, labels = self.batches.next(length)
            self._loss.add_(self.method.step(self, images, labels).float())
        self._drop_gradients()

    def _compilation(self) -> AbstractContextManager[None]:
        return compilation() if self._compiled else nullcontext()

    def without_compilation(self) -> AbstractContextManager[None]:
        """Run the model as it is inside the block, for passes other than steps with whole batches."""
        return no_compilation() if self._compiled else nullcontext()

    @contextmanager
    def captured(self, steps: int) -> Iterator[None]:
        """Do what a capture of some steps needs before and after it."""
        fused: list[Any] = [self.optimizer, *self._optimizers.values()] if self.publishes else []
        for optimizer in fused:
            optimizer.reserve(steps)
        yield
        for optimizer in fused:
            optimizer.settle()

    def upload(self) -> tuple[State, State, State, Tensor]:
        """Return the change, the method's reply, the new memory, and the summed loss, all on the device."""
        with torch.no_grad():
            floats, others = (
                torch._foreach_sub(live, start) if live else ()
                for live, start in zip(self._lives, self._starts, strict=True)
            )
        differences = iter(floats), iter(others)
        change = {name: next(differences[not tensor.is_floating_point()]) for name, tensor in self.start.items()}
        self.seed_step()
        self.use_generator()
        with self.without_compilation():
            return change, self.method.payload(self), self.method.next_client_state(self), self._loss.clone()

    def drop_moments(self) -> None:
        """Free the optimiser's state after the last step: the next client starts with a new one.

        Not for a GPU, where captured steps write into it.
        """
        for optimizer in (self.optimizer, *self._optimizers.values()):
            optimizer.state.clear()

    def _drop_gradients(self) -> None:
        """Free the gradients of a step: the next forward pass, or the change, takes their memory.

        On a GPU they stay: captured steps write into them.
        """
        if self.device.type == "cpu":
            for parameter in self.parameters.values():
                parameter.grad = None

    # ---- what a method's hooks may use

    def note(self, name: str, value: Tensor) -> Tensor:
        """Write a value into `notes`, in place of what an earlier turn left there: for `begin`, not for a step."""
        if name not in self.notes:
            self.notes[name] = on_device(torch.empty_like(value), self.device)
        return self.notes[name].copy_(value, non_blocking=True)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `parameters`, in place of those of the step before.

        Where the loss reaches some parameters only, those of the others are not to be used.
        """
        self.weights.backward(loss)
        if not self.publishes:
            self.weights.gather()

    def pull(
        self, strength: float | Mapping[str, float], towards: Sequence[Tensor] | None = None, *, by_norms: bool = False
    ) -> None:
        """Add strength times `offsets`, the gradient of a proximal term.

        For the end of `after_backward`: where the optimiser is ours it adds theta - towards on its way, and who looks
        at the gradients afterwards does not see it.
        """
        strengths = [strength[name] if isinstance(strength, Mapping) else strength for name in self.parameters]
        if not any(strengths):
            return
        if self.publishes and not self.training.max_grad_norm and not by_norms:
            towards = list(self.anchors if towards is None else towards)
            self.optimizer.pull(towards, strengths)  # type: ignore[union-attr]
            return
        offsets = self.offsets(towards, by_norms=by_norms)
        if isinstance(strength, Mapping):
            torch._foreach_mul_(offsets, strengths)
        torch._foreach_add_(self.gradients, offsets, alpha=1 if isinstance(strength, Mapping) else strength)

    def offsets(self, towards: Sequence[Tensor] | None = None, *, by_norms: bool = False) -> list[Tensor]:
        """Return theta - towards, the gradient of half its square; by norms, that of half of every tensor's norm of it.

        `towards` is the received part, if not told.
        """
        offsets = list(torch._foreach_sub(self.trained, list(self.anchors if towards is None else towards)))
        if by_norms:
            norms = torch._foreach_norm(offsets)
            torch._foreach_clamp_min_(norms, torch.finfo(offsets[0].dtype).tiny)  # where a turn begins it is zero
            torch._foreach_div_(offsets, torch._foreach_mul(norms, 2.0))
        return offsets

    def publish(self) -> None:
        """Let the model compute with `parameters` as they are now: after the last change of a step."""
        self.weights.publish()

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of this step, in the order of `trained`, to be changed in place."""
        self.weights.gather()
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def gradients_of(self, names: Iterable[str]) -> list[Tensor]:
        """Return the gradients of some parameters, to be changed in place."""
        self.weights.gather()
        return [gradient for name in names if (gradient := self.parameters[name].grad) is not None]

    @property
    def dtype(self) -> torch.dtype:
        """What images and activations are computed in."""
        return self.batches.dtype

    def in_order(self, state: State) -> list[Tensor]:
        """Return the parameters' tensors of a message, a memory or a part, in the order of `trained`."""
        return [state[name] for name in self.parameters]

    def by_name(self, tensors: Iterable[Tensor]) -> State:
        """Return tensors in the order of `trained` under their parameters' names."""
        return dict(zip(self.parameters, tensors, strict=True))

    @contextmanager
    def excursion(self) -> Iterator[None]:
        """Come back from a block with parameters and buffers as they were; gradients stay as the block made them."""
        with _restored([self.trained, *self._buffers]):
            yield

    @contextmanager
    def same_buffers(self) -> Iterator[None]:
        """Come back from a block with buffers as they were: a pass that leaves running statistics alone."""
        with _restored(self._buffers):
            yield

    def optimizer_of(self, names: Iterable[str]) -> Optimizer:
        """Return an optimiser of its own for some parameters, for a step apart from the others; fresh every turn."""
        self.weights.gather()
        own = tuple(names)
        if own not in self._optimizers:
            assert self.job is not None
            chosen = [self.parameters[name] for name in own]
            self._optimizers[own] = self._optimizer(chosen)
            reset(self._optimizers[own], self.training.lr(self.job.round_number))
        return self._optimizers[own]

    def first_images(self, count: int) -> Tensor:
        """Return the turn's first `count` images, as it saw them; over and over where it has fewer. Not captured."""
        return self.batches.first(count, self.lengths)

    def clip_gradient(self) -> None:
        """Bound the norm of the whole gradient, where the run asks for it."""
        if self.training.max_grad_norm:
            self.weights.gather()
            nn.utils.clip_grad_norm_(self.parameters.values(), self.training.max_grad_norm)

    def cross_entropy(self, answers: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, in single precision."""
        return F.cross_entropy(answers.float(), labels)

    def held_classes(self, classes: int) -> Tensor:
        """Return a one for every class of which the client has an example, and a zero for the others."""
        rows = torch.from_numpy(self.owned).to(self.device)
        return torch.zeros(classes, device=self.device).index_fill_(0, self.data.labels[rows], 1.0)

    def frozen(self, state: State, images: Tensor, ask: Ask = lambda model, images: model(images)) -> Tensor:
        """Return what this architecture answers with another state, in evaluation mode and without gradient."""
        self.model.eval()
        try:
            with torch.no_grad(), self.without_compilation():
                own = {f"model.{name}": tensor for name, tensor in self._working(state).items()}
                answer: Tensor = functional_call(_Asked(self.model, ask), own, (images,))
        finally:
            self.model.train()
        return answer

    def _working(self, state: State) -> State:
        """Return a state in the types that the model computes with; one grouped copy where they differ."""
        own = {name: state[name] for name in self._computing}
        wanted = {name: t for name, t in self._computing.items() if t.dtype != own[name].dtype}
        if wanted:
            cast = [torch.empty_like(tensor) for tensor in wanted.values()]
            torch._foreach_copy_(cast, [own[name] for name in wanted])
            own.update(zip(wanted, cast, strict=True))
        return own

    def examples(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a plan's batches without augmentation and in single precision, for a collection."""
        rows = plan.rows.to(self.device)
        for step, length in enumerate(plan.lengths):
            yield self.data.batch(rows[step, :length])
