"""What a round starts from, and what is known of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from motley.core.async_copy import AsyncCopy
from motley.core.part import State
from motley.evaluate import Evaluation, Score
from motley.privacy import PrivacyLedger


@dataclass(frozen=True)
class Server:
    """All that changes from round to round."""

    round_number: int
    """The last round that was completed; 0 before the first."""
    state: State
    averaged: State | None
    method: State
    """The method's own server state."""
    remembered: dict[int, int]
    """Client -> the round of its last upload that was taken."""
    optimizer: State = field(default_factory=dict)
    """The server optimiser's moments."""
    spent: PrivacyLedger = field(default_factory=PrivacyLedger)
    """The privacy cost of the rounds so far."""

    @property
    def model(self) -> State:
        """The state that is evaluated and handed out."""
        return self.state if self.averaged is None else self.averaged

    def with_model(self, model: State) -> Server:
        """Return a server that evaluates and hands out another state."""
        if self.averaged is None:
            return replace(self, state=model)
        return replace(self, averaged=model)


@dataclass
class Record:
    """What is known of one round."""

    round_number: int
    scores: dict[str, Score] = field(default_factory=dict)
    """Size -> score; empty where the round was not evaluated."""
    train_loss: float = float("nan")
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    repeated: list[dict[int, str]] = field(default_factory=list)
    """The reasons of each time that the round was played but not merged: too few uploads could be taken."""
    idle: list[int] = field(default_factory=list)
    """Clients that had no batch to train on."""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    inco: dict[str, dict[str, float]] = field(default_factory=dict)
    """Layer -> InCo's coefficients."""
    method: dict[str, float] = field(default_factory=dict)
    """The method's own numbers."""
    epsilon: dict[str, float] = field(default_factory=dict)
    """What the run has cost in privacy so far: for who sees models, and for who sees uploads."""
    evaluation: Evaluation | None = None
    """Where the scores will come from, until they are settled."""
    awaited: list[tuple[AsyncCopy, Callable[[list[Any]], None]]] = field(default_factory=list)
    """Other numbers that will come from the device, and what notes them."""

    @property
    def ready(self) -> bool:
        """Whether `settle` would not have to wait."""
        return (self.evaluation is None or self.evaluation.ready) and all(values.ready for values, _ in self.awaited)

    def settle(self) -> None:
        """Wait for the device, and note what it found."""
        if self.evaluation is not None:
            with self.timed("evaluate"):
                self.scores = self.evaluation.scores()
        for values, note in self.awaited:
            note(values.read())
        self.expect_nothing()

    def expect_nothing(self) -> None:
        """Let go of what the device is still at: the round ends otherwise, or not at all."""
        self.evaluation = None
        self.awaited.clear()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note how long a phase takes."""
        begin = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
