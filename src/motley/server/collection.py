"""Collections: passes over clients' data that do not train, between pipeline and evaluation.

A collection stage is like a stage of the pipeline that needs answers from clients first. The round
asks the engine to run the stage's jobs, rejects unusable answers, and applies the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from motley.core.device import on_device
from motley.core.part import size_in_bytes, take
from motley.engine.base import Engine, Failure, Job
from motley.evaluate import PendingScores
from motley.methods.base import Collection, ServerAlgorithm
from motley.server.metrics import Metrics
from motley.server.state import ServerState
from motley.server.state_check import StateCheck
from motley.server.timing import Timer
from motley.server.validation import collection_error
from motley.splits.base import Split


@dataclass(frozen=True)
class CollectionResult:
    """The result of a collection stage.

    evaluation: the scores of clients' own models, if the stage asked for them.
    metrics: numbers for the round's record.
    """

    server: ServerState
    evaluation: PendingScores | None = None
    metrics: Metrics = field(default_factory=dict)


class CollectionStage(Protocol):
    """Something that asks clients for a collection after a round."""

    @property
    def phase(self) -> str:
        """The name under which the round's record has its time."""
        ...

    def jobs(self, server: ServerState, sampled: Sequence[int]) -> list[Job]:
        """Return jobs for clients; empty if nothing is collected after this round.

        `sampled`: its clients.
        """
        ...

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Say why a client's answer cannot be used; None if it can.

        Only nodes elsewhere are checked.
        """
        ...

    def apply(self, server: ServerState, collections: Sequence[Collection]) -> CollectionResult:
        """Use the clients' answers, of which there is at least one."""
        ...


@dataclass(frozen=True)
class MethodCollection:
    """The method's own collection, on the model that is evaluated.

    size_of: (client, round) -> the client's size.
    """

    algorithm: ServerAlgorithm
    split: Split
    size_of: Callable[[int, int], str]
    phase: str = "collect"

    def jobs(self, server: ServerState, sampled: Sequence[int]) -> list[Job]:
        """Return jobs for the clients that the method wants to ask after this round."""
        jobs = []
        number = server.round_number
        for client in self.algorithm.collection_clients(number):
            size = self.size_of(client, number)
            job = Job(
                round_number=number,
                client=client,
                size=size,
                state=take(server.model, self.split.evaluated(size, number)),
                broadcast=self.algorithm.broadcast(
                    server.method_state, server.state, number, client
                ),
                client_state_round=server.client_state_rounds.get(client),
            )
            jobs.append(job)
        return jobs

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Try the collection on its own."""
        return collection_error(self.algorithm, server, collection)

    def apply(self, server: ServerState, collections: Sequence[Collection]) -> CollectionResult:
        """Let the method use the collections."""
        method_state, model = self.algorithm.apply_collection(
            server.method_state, server.model, collections
        )
        server = replace(server.with_model(model), method_state=method_state)
        return CollectionResult(server)


@dataclass(frozen=True)
class Collected:
    """The server state after all collections of a round, and their traffic and time."""

    server: ServerState
    evaluation: PendingScores | None
    metrics: Metrics
    rejected: dict[int, str]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]


def run_collections(
    stages: Sequence[CollectionStage],
    engine: Engine,
    server: ServerState,
    sampled: Sequence[int],
    device: torch.device,
) -> Collected:
    """Run the collections of all stages after this round, and apply the usable answers.

    `sampled` are the round's clients, and `device` is the server's.
    """
    evaluation: PendingScores | None = None
    metrics: dict[str, Tensor | float] = {}
    rejected: dict[int, str] = {}
    bytes_down, bytes_up = 0, 0
    timer = Timer()
    for stage in stages:
        jobs = stage.jobs(server, sampled)
        if not jobs:
            continue
        with timer.phase(stage.phase):
            answers = ask(stage, engine, server, jobs, device)
            bytes_down += answers.bytes_down
            bytes_up += answers.bytes_up
            rejected.update(answers.rejected)
            if answers.collections:
                result, left_out = _apply(stage, engine, server, answers.collections)
                rejected.update(left_out)
                server = result.server
                evaluation = result.evaluation or evaluation
                metrics.update(result.metrics)
    return Collected(server, evaluation, metrics, rejected, bytes_down, bytes_up, timer.seconds)


def _apply(
    stage: CollectionStage, engine: Engine, server: ServerState, collections: Sequence[Collection]
) -> tuple[CollectionResult, dict[int, str]]:
    """Apply the answers of a stage, except answers of nodes that would spoil the server state.

    An answer may be valid and still hold 1e30. If the state is not usable, every answer is tried on
    its own to find the responsible ones.
    """
    result = stage.apply(server, collections)
    if engine.trusted or result.server is server:
        return result, {}
    problem = StateCheck(server, result.server, (), 0.0).problem
    if problem is None:
        return result, {}
    rest: list[Collection] = []
    left_out: dict[int, str] = {}
    for collection in collections:
        alone = stage.apply(server, [collection]).server
        if StateCheck(server, alone, (), 0.0).problem is None:
            rest.append(collection)
        else:
            left_out[collection.client] = f"its collection was left out: with it, {problem}."
    if rest and left_out:
        result = stage.apply(server, rest)
        if StateCheck(server, result.server, (), 0.0).problem is None:
            return result, left_out
    reason = f"the collection was undone: {problem}."
    return CollectionResult(server), {collection.client: reason for collection in collections}


class Asking(Protocol):
    """The part of a stage that checks answers."""

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Say why a client's answer cannot be used; None if it can."""
        ...


@dataclass(frozen=True)
class Answers:
    """The clients' answers to the jobs of one stage.

    collections: the usable answers.
    rejected: client -> why there is no usable answer.
    """

    collections: list[Collection]
    rejected: dict[int, str]
    bytes_down: int
    bytes_up: int


def ask(
    stage: Asking, engine: Engine, server: ServerState, jobs: Sequence[Job], device: torch.device
) -> Answers:
    """Have the engine run a stage's jobs, and reject the answers that cannot be used."""
    answers = engine.collect(jobs)
    collections = [answer for answer in answers if isinstance(answer, Collection)]
    down = 0
    state_bytes: dict[int, int] = {}  # a thousand clients may share one state
    for job in jobs:
        if id(job.state) not in state_bytes:
            state_bytes[id(job.state)] = size_in_bytes(job.state)
        down += state_bytes[id(job.state)] + size_in_bytes(job.broadcast)
    up = sum(size_in_bytes(collection.values) for collection in collections)
    rejected = {}
    for answer in answers:
        if isinstance(answer, Failure):
            rejected[answer.client] = f"its collection failed: {answer.reason}"
    if not engine.trusted:
        collections, errors = _check(stage, server, collections, device)
        rejected.update(errors)
    return Answers(collections, rejected, down, up)


def _check(
    stage: Asking, server: ServerState, answers: Sequence[Collection], device: torch.device
) -> tuple[list[Collection], dict[int, str]]:
    """Return the usable answers of nodes on the server's device, and why others are not usable."""
    usable: list[Collection] = []
    errors: dict[int, str] = {}
    for answer in answers:
        values = {name: on_device(tensor, device) for name, tensor in answer.values.items()}
        collection = replace(answer, values=values)
        error = stage.error(server, collection)
        if error:
            errors[collection.client] = error
        else:
            usable.append(collection)
    return usable, errors
