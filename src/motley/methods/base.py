"""The contract of a method: what a client minimises and what travels.

A method knows nothing of engines, files or the screen. Each hook has a default that makes it FedAvg, so a method is
"FedAvg, and this". Client hooks run in the engine, on a GPU inside a captured graph: they work on tensors, in place
where they change something, and never ask the device for a value. Server hooks take the state and return a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import SerializeAsAny
from torch import Tensor

from motley.aggregate.inco import INCO, IncoOff
from motley.core.async_copy import to_device
from motley.core.merge import Aggregate, merge
from motley.core.part import State, add_at
from motley.core.registry import Registry
from motley.core.update import ClientUpdate
from motley.models import ImageShape
from motley.settings import Settings
from motley.splits.base import Split

if TYPE_CHECKING:
    from motley.engine.learner import Learner


REPORTED = "reported/"
"""What the names of a reply's numbers begin with that are for the round's record and nothing else."""


class MethodSettings(Settings):
    """The method, and InCo on top of it.

    A method with settings of its own derives its class from this one.
    """

    lasting = ("inco",)

    name: str = "fedavg"
    """The method (`motley list methods`). The papers' names, such as InCoProx, are accepted too."""
    inco: Annotated[SerializeAsAny[IncoOff], INCO] = IncoOff()


@dataclass(frozen=True)
class FederationInfo:
    """What a method may know of the federation it serves."""

    split: Split
    sizes: tuple[str, ...]
    """The size of every client, by client id."""
    classes: int
    seed: int
    rounds: int
    image: ImageShape
    every: int = 1
    """Rounds between evaluations."""
    drawn: Callable[[int, int], str] | None = None
    """(client, round) -> the client's size, where sizes are drawn anew every round."""

    def size_of(self, client: int, round_number: int) -> str:
        """Return the size of a client in a round."""
        return self.drawn(client, round_number) if self.drawn else self.sizes[client]

    def is_evaluated(self, round_number: int) -> bool:
        """Tell whether a round ends with an evaluation."""
        return round_number % self.every == 0 or round_number == self.rounds

    def owners(self, name: str, device: torch.device | str = "cpu") -> int | Tensor:
        """Return how many of all clients hold a global name; if some hold pieces of it, one count per coordinate.

        Such counts stay on the device that last asked for them. They get there through pinned memory: a plain copy
        would make the host wait for everything that the GPU still has to do.
        """
        count = self._owners[name]
        if isinstance(count, Tensor):
            count = self._owners[name] = to_device(count, torch.device(device))
        return count

    @cached_property
    def _owners(self) -> dict[str, int | Tensor]:
        clients = Counter(self.sizes)
        whole: Counter[str] = Counter()
        pieces: State = {}
        for size in self.split.sizes:
            for piece in self.split.part(size).values():
                if piece.index is None:
                    whole[piece.name] += clients[size]
                else:
                    counts = pieces.setdefault(piece.name, torch.zeros(self.split.frame[piece.name].shape))
                    add_at(counts, piece.index, float(clients[size]))
        return {**whole, **{name: counts + whole[name] for name, counts in pieces.items()}}


@dataclass(frozen=True)
class Collection:
    """What one client answered in a collection pass."""

    client: int
    samples: int
    values: State = field(default_factory=dict)
    size: str = ""
    round_number: int = 0


class Method:
    """FedAvg, and the hooks that other methods override."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    exchanges_weights: ClassVar[bool] = True
    """False for methods that send logits, prototypes or features only; InCo has nothing to act on there."""
    #: True for methods whose training depends on `FederationInfo.rounds`: a run that is extended later then differs
    #: from one that had all its rounds from the start.
    uses_total_rounds: ClassVar[bool] = False

    def __init__(self, settings: MethodSettings, world: FederationInfo) -> None:
        self.settings = settings
        self.info = world

    # ---- server, before training

    def init(self) -> State:
        """Return the method's own server state before the first round (control variates, a feature pool)."""
        return {}

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        """Return what travels to a client beside its part."""
        return {}

    # ---- client

    def initial_client_state(self, size: str, received: State) -> State:
        """Return what a client of this size remembers before its first turn, when it receives this part.

        It is kept between rounds where the client trains. Which of the part's names are parameters:
        `self.info.split.parameters_of(size)`.
        """
        return {}

    def before_training(self, learner: Learner) -> None:
        """Prepare a turn, once the part, the message and the memory are in place. Not captured."""

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        """Return what the client minimises on a batch."""
        return learner.cross_entropy(learner.model(images), labels)

    def after_backward(self, learner: Learner) -> None:
        """Change the gradients before the optimiser's step."""

    def after_step(self, learner: Learner) -> None:
        """Change the weights after the optimiser's step."""

    def step(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        """Take one step and return its loss. A method that needs two passes or two losses replaces the whole of it."""
        loss = self.loss(learner, images, labels)
        learner.backward(loss)
        self.descend(learner)
        return loss.detach()

    def descend(self, learner: Learner) -> None:
        """Go where the gradients point: the second half of a step, no hook of its own."""
        self.after_backward(learner)
        learner.clip_gradient()
        learner.optimizer.step()
        if type(self).after_step is not Method.after_step or not learner.publishes:
            self.after_step(learner)
            learner.publish()

    def payload(self, learner: Learner) -> State:
        """Return what travels to the server beside the change, on the learner's device. Not captured."""
        return {}

    def next_client_state(self, learner: Learner) -> State:
        """Return the client's memory after its turn. Not captured."""
        return {}

    # ---- server, after training

    def aggregate(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the mean change, before InCo."""
        return merge(state, updates)

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the method's server state after the round. `state` is the global state the clients started from."""
        return server

    def adjust_aggregate(self, server: State, merged: Aggregate) -> Aggregate:
        """Return the change after InCo and before it is applied (FedDyn's h). `server` is what `learn` returned."""
        return merged

    def post_process(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the new global state after training at the server (distillation)."""
        return state

    def metrics(self, server: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return numbers of the method's own for the round's record. `server` is what `learn` returned.

        Here they are what clients reported: each number's mean over those who sent it as `reported/NAME`.
        """
        sent: dict[str, list[Tensor]] = {}
        for update in updates:
            for name, number in update.payload.items():
                if name.startswith(REPORTED):
                    sent.setdefault(name.removeprefix(REPORTED), []).append(number.float().mean())
        return {name: torch.stack(numbers).mean() for name, numbers in sent.items()}

    # ---- a pass over clients that does not train

    def collection_clients(self, round_number: int) -> Sequence[int]:
        """Return the clients that are asked for a collection after this round."""
        return ()

    def collect(self, learner: Learner, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Return a client's answer, from one pass over its data without augmentation."""
        return {}

    def apply_collection(self, server: State, state: State, collections: Sequence[Collection]) -> tuple[State, State]:
        """Return the method's server state and the global state, with what the clients answered."""
        return server, state


METHODS: Registry[type[Method]] = Registry("method")
