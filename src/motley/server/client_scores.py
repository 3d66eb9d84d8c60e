"""A score for every client, on test examples of its own, after an evaluated round.

A client is scored where its test examples are, with its size's part of the evaluated global model,
and answers with sums and counts. If the run asks for it, the client then trains that part on its
training examples and is scored again: the personalized score. Nothing of this training is sent or
stored, so a run ends in the same state with and without client scores (tested). Clients that have
models of their own, or complete their parts by private tensors, score these.

Clients of this process that have the same size are scored in one pass (`LocalEngine.collect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motley.client.scoring import PERSONALIZED, SCORE
from motley.core.async_copy import AsyncCopy
from motley.core.part import State, take
from motley.engine.base import Engine, Job
from motley.methods.base import Collection, ServerAlgorithm
from motley.server.collection import Answers, ask
from motley.server.state import ServerState
from motley.server.validation import client_sums_error
from motley.splits.base import Split
from motley.tasks import MetricInfo

#: The fraction of clients that `Spread.worst_tenth` is over.
TENTH = 0.1


@dataclass(frozen=True)
class Spread:
    """How a score is distributed over clients.

    mean: every client counts the same.
    weighted: clients count by their numbers of test examples.
    worst_tenth: the mean over the tenth of the clients with the worst scores, rounded up.
    std: the standard deviation over clients (of all of them, not of a sample).
    min, max: the lowest and the highest score, whichever is better.
    """

    clients: int
    mean: float
    weighted: float
    worst_tenth: float
    std: float
    min: float
    max: float


def spread(scores: Sequence[float], examples: Sequence[int], higher_is_better: bool) -> Spread:
    """Summarize the scores of at least one client, given its numbers of test examples.

    If a score is NaN, because its client's local training diverged, all numbers are: NaN has no
    place in an order, so the worst tenth would depend on the order of the clients.
    """
    count = len(scores)
    if any(math.isnan(score) for score in scores):
        nan = math.nan
        return Spread(count, nan, nan, nan, nan, nan, nan)
    mean = math.fsum(scores) / count
    products = [score * weight for score, weight in zip(scores, examples, strict=True)]
    worst_first = sorted(scores, reverse=not higher_is_better)
    # 1e-9: a tenth of 30 clients is 3, whatever the rounding of 0.1 * 30.
    worst = worst_first[: math.ceil(TENTH * count - 1e-9)]
    return Spread(
        clients=count,
        mean=mean,
        weighted=math.fsum(products) / sum(examples),
        worst_tenth=math.fsum(worst) / len(worst),
        std=math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / count),
        min=min(scores),
        max=max(scores),
    )


@dataclass(frozen=True)
class ClientScore:
    """The score of one client. `personalized`: after local training; None if not asked for."""

    client: int
    size: str
    examples: int
    score: float
    personalized: float | None = None


@dataclass(frozen=True)
class ClientScores:
    """The scores of clients after a round.

    scores: the clients that have a score, in the order of their ids.
    unscored: the clients that were asked and have none: no test examples, no usable answer, or a
        score that is not a number (r2 of a single example).
    bytes_down, bytes_up: the traffic of asking them, which is not counted in the round's own.
    """

    metric: MetricInfo
    scores: Sequence[ClientScore]
    unscored: Sequence[int] = ()
    bytes_down: int = 0
    bytes_up: int = 0

    def spread(self, size: str | None = None) -> Spread | None:
        """Summarize the scores of all clients, or of one size's; None if there are none."""
        chosen = self._of(size)
        scores = [score.score for score in chosen]
        return self._spread(scores, [score.examples for score in chosen])

    def personalized_spread(self, size: str | None = None) -> Spread | None:
        """Summarize the personalized scores; None if there are none."""
        chosen = self._of(size)
        scores = []
        for score in chosen:
            if score.personalized is not None:
                scores.append(score.personalized)
        return self._spread(scores, [score.examples for score in chosen]) if scores else None

    @property
    def sizes(self) -> list[str]:
        """The sizes of the scored clients, in the order in which they first occur."""
        return list(dict.fromkeys(score.size for score in self.scores))

    def _of(self, size: str | None) -> list[ClientScore]:
        if size is None:
            return list(self.scores)
        return [score for score in self.scores if score.size == size]

    def _spread(self, scores: Sequence[float], examples: Sequence[int]) -> Spread | None:
        return spread(scores, examples, self.metric.higher_is_better) if scores else None


@dataclass(frozen=True)
class ScoreClients:
    """Asks clients for their scores, like a collection stage whose answers change nothing.

    is_due: round -> whether clients are scored after it.
    size_of: (client, round) -> the client's size.
    num_clients: the number of all clients, who are asked; None: only the clients of the round are.
    personalize: also ask for the score after local training. Clients' own models are personal
        already, and have the same score twice.
    own_models: clients score models of their own, or with private tensors.
    sends_parts: clients need their parts of the global state for that.
    """

    algorithm: ServerAlgorithm
    split: Split
    size_of: Callable[[int, int], str]
    is_due: Callable[[int], bool]
    num_clients: int | None = None
    personalize: bool = False
    own_models: bool = False
    sends_parts: bool = True

    @property
    def _trains(self) -> bool:
        return self.personalize and not self.own_models

    def clients(self, server: ServerState, sampled: Sequence[int]) -> list[int]:
        """Return the clients that are asked after this round: none if it is not due."""
        if not self.is_due(server.round_number):
            return []
        asked = list(sampled) if self.num_clients is None else list(range(self.num_clients))
        if not self.own_models:
            return asked
        return [client for client in asked if client in server.client_state_rounds]

    def jobs(self, server: ServerState, sampled: Sequence[int]) -> list[Job]:
        """Return the jobs for the clients. Clients of one size share one state."""
        number = server.round_number
        states: dict[str, State] = {}
        jobs = []
        for client in self.clients(server, sampled):
            size = self.size_of(client, number)
            if size not in states:
                states[size] = self._state(server, size)
            job = Job(
                round_number=number,
                client=client,
                size=size,
                state=states[size],
                broadcast=self._broadcast(server, client),
                client_state_round=server.client_state_rounds.get(client),
                collection="personalized-score" if self._trains else "client-score",
            )
            jobs.append(job)
        return jobs

    def _state(self, server: ServerState, size: str) -> State:
        if not self.sends_parts:
            return {}
        return take(server.model, self.split.evaluated(size, server.round_number))

    def _broadcast(self, server: ServerState, client: int) -> State:
        if self.own_models:
            return self.algorithm.evaluation_broadcast(server.method_state)
        if not self._trains:
            return {}
        return self.algorithm.broadcast(
            server.method_state, server.state, server.round_number, client
        )

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Say why a client's answer cannot be used; None if it can."""
        names = (SCORE, PERSONALIZED) if self._trains else (SCORE,)
        info = self.algorithm.info
        return client_sums_error(names, info.task.primary, info.classes, collection.values)


def start_client_scores(
    stage: ScoreClients,
    engine: Engine,
    server: ServerState,
    sampled: Sequence[int],
    device: torch.device,
) -> tuple[PendingClientScores | None, dict[int, str]]:
    """Ask clients for their scores after a round, and start to copy their answers to the host.

    Returns None if clients are not scored after this round, and why answers were rejected.
    """
    jobs = stage.jobs(server, sampled)
    if not jobs:
        return None, {}
    answers = ask(stage, engine, server, jobs, device)
    return PendingClientScores(stage, jobs, answers), answers.rejected


class PendingClientScores:
    """Clients' answers on their way from the device to the host, all in one copy."""

    def __init__(self, stage: ScoreClients, jobs: Sequence[Job], answers: Answers) -> None:
        self._metric, self._personalize = stage.algorithm.info.task.primary, stage.personalize
        self._answers = answers
        self._asked = [job.client for job in jobs]
        self._collections = sorted(answers.collections, key=lambda answer: answer.client)
        rows: list[Tensor] = []
        for answer in self._collections:
            sums = answer.values[SCORE]
            rows.append(torch.stack([sums, answer.values.get(PERSONALIZED, sums)]))
        self._rows = AsyncCopy(torch.stack(rows) if rows else torch.zeros(0))

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return self._rows.ready

    def read(self) -> ClientScores:
        """Wait for the device and return the scores."""
        scores = []
        for answer, (before, after) in zip(self._collections, self._rows.read(), strict=True):
            score = ClientScore(
                client=answer.client,
                size=answer.size,
                examples=answer.samples,
                score=self._metric.value(before),
                personalized=self._metric.value(after) if self._personalize else None,
            )
            if not math.isnan(score.score):
                scores.append(score)
        scored = {score.client for score in scores}
        return ClientScores(
            metric=self._metric,
            scores=scores,
            unscored=[client for client in self._asked if client not in scored],
            bytes_down=self._answers.bytes_down,
            bytes_up=self._answers.bytes_up,
        )
