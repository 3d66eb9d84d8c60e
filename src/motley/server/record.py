"""The record of a round."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from statistics import fmean

from motley.evaluate import PendingScores, Score
from motley.server.client_scores import ClientScores, PendingClientScores
from motley.server.metrics import PendingMetrics


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round, from which the metrics log and all displays are made.

    round_number: the round.
    clients: the clients that were sampled.
    refused: client -> why its update, or its answer in a collection, was rejected
        (`validation.py`), or why it sent none.
    repeated: for each earlier attempt at the round, which had too few accepted updates, its
        rejected clients.
    idle: sampled clients that had no batch to train on.
    train_loss: mean training loss of the accepted updates; NaN if it is not known.
    num_steps: local steps of the accepted updates together.
    scores: size -> score on the test set; empty if the round was not evaluated. If the method
        exchanges no weights, the mean over clients' own models.
    why_no_scores: why an evaluated round has no scores; empty if it has.
    client_scores: the scores of clients on test examples of their own; None if clients were not
        scored after this round.
    metrics: numbers of stages and of the method, such as `inco/LAYER/theta` or `method/pool`; empty
        if no update was accepted.
    epsilon: privacy spent so far, towards an adversary who sees models and one who sees uploads.
    seconds: phase -> time.
    bytes_down, bytes_up: traffic to and from the clients.
    """

    round_number: int
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    repeated: list[dict[int, str]] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    train_loss: float = math.nan
    num_steps: int = 0
    scores: dict[str, Score] = field(default_factory=dict)
    client_scores: ClientScores | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    epsilon: dict[str, float] = field(default_factory=dict)
    why_no_scores: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0

    @property
    def round(self) -> int:
        """The number of the round, from 1 on."""
        return self.round_number

    @property
    def score(self) -> float | None:
        """The mean over sizes of the task's primary metric; None if nothing was evaluated."""
        values = [score.value for score in self.scores.values()]
        return fmean(values) if values else None

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy over sizes; None if nothing was evaluated, or the task has none."""
        values = [score.accuracy for score in self.scores.values() if score.accuracy is not None]
        return fmean(values) if values else None


class PendingRecord:
    """A record whose scores and metrics may still be computed while the next round begins.

    A GPU does so, and so do the worker processes of a CPU.
    """

    def __init__(
        self,
        record: RoundRecord,
        evaluation: PendingScores | None,
        metrics: PendingMetrics,
        client_scores: PendingClientScores | None = None,
    ) -> None:
        self._record, self._evaluation, self._metrics = record, evaluation, metrics
        self._client_scores = client_scores
        self._complete: RoundRecord | None = None

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting for the device."""
        scores = (self._evaluation, self._client_scores)
        return self._metrics.ready and all(one is None or one.ready for one in scores)

    def read(self) -> RoundRecord:
        """Wait for the device and return the complete record.

        The wait is part of the evaluation's time.
        """
        if self._complete is None:
            begin = time.perf_counter()
            scores = {} if self._evaluation is None else self._evaluation.scores()
            metrics = self._metrics.read()
            clients = None if self._client_scores is None else self._client_scores.read()
            seconds = dict(self._record.seconds)
            if self._evaluation is not None:
                seconds["evaluate"] = seconds.get("evaluate", 0.0) + time.perf_counter() - begin
            self._complete = replace(
                self._record,
                scores=scores,
                client_scores=clients,
                metrics=metrics,
                seconds=seconds,
            )
        return self._complete
