"""A client while it trains: its model, its optimiser, and every tensor that a method's client hooks may use.

All tensors stay where they are for the learner's whole life. A turn copies a client's values into them, and a step
reads its batch by a counter on the device; that is what lets a step be captured once as a CUDA graph and replayed for
any client of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from motley.data.device import DRAWS, DeviceData
from motley.engine.base import Job
from motley.engine.device import place
from motley.engine.training import Plan, TrainingSettings
from motley.methods.base import Method
from motley.models.norm import use_fused
from motley.randomness import key
from motley.splits.part import State

PREPARED_BYTES = 256 * 2**20
"""Most memory for the prepared batches of a turn."""


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
        fused: bool = False,
    ) -> None:
        device = data.device
        self.model = place(model, device).train()
        if fused and device.type == "cuda":
            use_fused(self.model)
        self.method, self.training, self.data, self.device = method, training, data, device
        self.precision = precision
        self.parameters: State = dict(self.model.named_parameters())
        self.tensors: State = self.model.state_dict(keep_vars=True)
        """Parameters and buffers: the live part."""
        self.start: State = {name: torch.empty_like(tensor.detach()) for name, tensor in self.tensors.items()}
        """The part as it was received; frozen during the turn."""
        self.message: State = {}
        self.memory: State = {}
        self.optimizer = training.optimizer.build(self.model, device)
        self.lr: Tensor | float = self.optimizer.param_groups[0]["lr"]
        self.round = torch.zeros((), dtype=torch.long, device=device)
        self.samples = torch.zeros((), dtype=torch.long, device=device)
        self.lengths: list[int] = []
        self._cursor = torch.zeros(1, dtype=torch.long, device=device)
        self._rows = torch.zeros((longest, training.batch_size), dtype=torch.long, device=device)
        self._draws = torch.zeros((longest, training.batch_size, DRAWS if data.random else 0), device=device)
        self._images, self._labels = self._room_for_images(longest)
        self._loss = torch.zeros((), device=device)
        self.taken = 0
        self._seed = 0
        self.job: Job | None = None
        self.generator = torch.Generator(device) if device.type == "cuda" else None

    # ---- a turn

    def hold(self, message: State, memory: State) -> None:
        """Make room for a message and a memory; room that already fits is kept, so captured steps stay valid."""
        for room, values in ((self.message, message), (self.memory, memory)):
            if {n: t.shape for n, t in room.items()} != {n: t.shape for n, t in values.items()}:
                room.clear()
                room.update({n: torch.zeros_like(t, device=self.device) for n, t in values.items()})

    def load(self, job: Job, memory: State, plan: Plan, seed: int, samples: int) -> None:
        """Take a client's seat: its part, message, memory and plan, with a fresh optimiser."""
        self.job, self.lengths, self.taken = job, plan.lengths, 0
        self._seed = seed
        self.hold(job.message, memory)
        with torch.no_grad():
            received = [job.state[name] for name in self.start]
            torch._foreach_copy_(list(self.start.values()), received)
            torch._foreach_copy_([tensor.detach() for tensor in self.tensors.values()], received)
            for room, values in ((self.message, job.message), (self.memory, memory)):
                for name, tensor in values.items():
                    room[name].copy_(tensor, non_blocking=True)
        self._reset_optimizer(self.training.lr(job.round_number))
        self._copy_plan(plan)
        self.round.fill_(job.round_number)
        self.samples.fill_(samples)
        self.rewind()
        self.method.begin(self)

    def rewind(self) -> None:
        """Point the counter at the plan's first batch."""
        self._cursor.zero_()
        self._loss.zero_()

    def _reset_optimizer(self, lr: float) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = self.optimizer.param_groups[0]["lr"] = lr

    def _copy_plan(self, plan: Plan) -> None:
        steps = len(plan.lengths)
        if not steps:
            return
        self._rows[:steps].copy_(self._pinned(plan.rows), non_blocking=True)
        if plan.draws is not None:
            self._draws[:steps].copy_(self._pinned(plan.draws), non_blocking=True)
        if self._images is not None:
            self._prepare(steps)

    def _room_for_images(self, longest: int) -> tuple[Tensor | None, Tensor]:
        """Return room for all batches of a turn, where that is not too much: then they are made once, not step by step.

        A step's own few kernels for index, crop, flip and cutout would otherwise take a fifth of a small model's step.
        """
        shape, batch = self.data.shape, self.training.batch_size
        labels = torch.zeros((longest, batch), dtype=torch.long, device=self.device)
        if 4 * longest * batch * shape.channels * shape.height * shape.width > PREPARED_BYTES:
            return None, labels
        return torch.zeros((longest, batch, shape.height, shape.width, shape.channels), device=self.device), labels

    def _prepare(self, steps: int) -> None:
        assert self._images is not None
        draws = self._draws[:steps].flatten(0, 1) if self.data.random else None
        images, labels = self.data.batch(self._rows[:steps].flatten(), draws)
        self._images[:steps] = images.permute(0, 2, 3, 1).unflatten(0, (steps, -1))
        self._labels[:steps] = labels.unflatten(0, (steps, -1))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    @property
    def finished(self) -> bool:
        """Whether the turn's last step has been taken."""
        return self.taken == len(self.lengths)

    def seed_step(self) -> None:
        """Key torch's own generator for the next step, so that dropout and noise do not depend on the schedule.

        On a GPU every learner has a generator state of its own: steps on different streams would otherwise race for
        the one seed that captured graphs read.
        """
        assert self.job is not None
        number = key(self._seed, "step", self.job.round_number, self.job.client, self.taken)
        torch.random.default_generator.manual_seed(number)
        if self.generator is not None:
            self.generator.manual_seed(number)

    def use_generator(self) -> None:
        """Make this learner's generator state the one that torch's random functions on its GPU draw from."""
        if self.generator is not None:
            default = torch.cuda.default_generators[self.device.index]
            default.graphsafe_set_state(self.generator.graphsafe_get_state())

    def step(self, length: int) -> None:
        """Take the step that the counter on the device points at. This is what a graph captures."""
        images, labels = self._batch(length)
        self._loss.add_(self.method.step(self, images, labels).float())
        self._cursor.add_(1)

    def _batch(self, length: int) -> tuple[Tensor, Tensor]:
        if self._images is not None:
            images = self._images.index_select(0, self._cursor)[0, :length].permute(0, 3, 1, 2)
            return images, self._labels.index_select(0, self._cursor)[0, :length]
        rows = self._rows.index_select(0, self._cursor)[0, :length]
        draws = self._draws.index_select(0, self._cursor)[0, :length] if self.data.random else None
        return self.data.batch(rows, draws)

    def upload(self) -> tuple[State, State, State, Tensor]:
        """Return the change, the method's reply, the new memory, and the summed loss, all on the device."""
        live = [tensor.detach() for tensor in self.tensors.values()]
        with torch.no_grad():
            change = dict(zip(self.tensors, torch._foreach_sub(live, list(self.start.values())), strict=True))
        return change, self.method.reply(self), self.method.remember(self), self._loss.clone()

    # ---- what a method's hooks may use

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the run's precision."""
        enabled = self.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)

    def clip_gradient(self) -> None:
        """Bound the norm of the whole gradient, where the run asks for it."""
        if self.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)

    def frozen(self, state: State, images: Tensor) -> Tensor:
        """Return what this architecture answers with another state, in evaluation mode and without gradient."""
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                answer: Tensor = functional_call(self.model, state, (images,))
        finally:
            self.model.train()
        return answer

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a plan's batches without augmentation, for a collection."""
        rows = plan.rows.to(self.device)
        for step, length in enumerate(plan.lengths):
            yield self.data.batch(rows[step, :length])
