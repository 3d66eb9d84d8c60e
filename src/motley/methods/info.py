"""The facts about a federation that a method may use: few for the client half, more for the server
half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from motley.core.async_copy import to_device
from motley.core.merge import Aggregate, merge
from motley.core.part import State, add_at
from motley.core.robust import MergeRule
from motley.core.update import ClientUpdate
from motley.data.public import PublicData
from motley.models import InputShape
from motley.splits.base import Split
from motley.tasks import CLASSIFICATION, Task


class Optimizer(Protocol):
    """The clients' optimizer, as configured."""

    @property
    def name(self) -> str:
        """sgd, adam or adamw."""
        ...

    @property
    def sgd_momentum(self) -> float | None:
        """Momentum of SGD; None for other optimizers."""
        ...


class Training(Protocol):
    """How clients train, as configured: the part of `motley.client.training.TrainingSettings` used
    here.
    """

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        ...

    @property
    def epochs(self) -> float:
        """Local epochs per round."""
        ...

    @property
    def batch_size(self) -> int:
        """Examples in a full batch."""
        ...

    @property
    def label_smoothing(self) -> float:
        """Weight that is spread evenly over all classes in the clients' loss."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        ...

    def lr(self, round_number: int) -> float:
        """Return the learning rate of a round."""
        ...


@dataclass(frozen=True)
class ClientInfo:
    """The facts that every client knows. None of them is about another client."""

    split: Split
    classes: int
    input_shape: InputShape
    training: Training
    seed: int
    #: Public images, if the method's clients use them (`Requirements.client_public_data`).
    public: PublicData | None = None
    task: Task = CLASSIFICATION


@dataclass(frozen=True)
class FederationInfo:
    """The facts that the server knows."""

    split: Split
    #: The size of every client, by client id.
    sizes: tuple[str, ...]
    classes: int
    seed: int
    training: Training
    input_shape: InputShape
    #: Rounds between evaluations.
    every: int = 1
    #: (client, round) -> the client's size, if sizes are drawn anew in every round.
    drawn: Callable[[int, int], str] | None = None
    #: Public images (`[public]`), if the method uses them. A node has them only if its clients do.
    public: PublicData | None = None
    task: Task = CLASSIFICATION
    #: The rule that takes the place of the mean over owners (`server.merge`); None: the mean.
    robust_merge: MergeRule | None = None

    def merge(self, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        """Combine the clients' deltas by the run's rule: by default, the mean over owners."""
        rule: MergeRule = merge if self.robust_merge is None else self.robust_merge
        return rule(state, updates)

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        return self.training.rounds

    def for_clients(self) -> ClientInfo:
        """Return the facts that every client knows."""
        return ClientInfo(
            self.split,
            self.classes,
            self.input_shape,
            self.training,
            self.seed,
            self.public,
            self.task,
        )

    def size_of(self, client: int, round_number: int) -> str:
        """Return the size of a client in a round."""
        return self.drawn(client, round_number) if self.drawn else self.sizes[client]

    def is_evaluated(self, round_number: int) -> bool:
        """Tell whether a round ends with an evaluation."""
        return round_number % self.every == 0 or round_number == self.rounds

    def owners(self, name: str, device: torch.device | str = "cpu") -> int | Tensor:
        """Return how many clients hold a global name; one count per coordinate if some hold pieces.

        Counts per coordinate stay on the device that last asked for them. They get there through
        pinned memory: a plain copy would make the host wait for all queued work of the GPU.
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
                    continue
                if piece.name not in pieces:
                    pieces[piece.name] = torch.zeros(self.split.meta_state[piece.name].shape)
                add_at(pieces[piece.name], piece.index, float(clients[size]))
        owners: dict[str, int | Tensor] = dict(whole)
        for name, counts in pieces.items():
            owners[name] = counts + whole[name]
        return owners
