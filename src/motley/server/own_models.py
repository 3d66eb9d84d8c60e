"""The evaluation of clients' own models: of methods that exchange no weights, of personal models
beside the global one, and of models with private tensors (`split.private`).

Clients then do not use the global model alone. After an evaluated round, clients score their
own models where these are, on the test set of the federation or, on a node, on the node's own. A
client with private tensors is sent its part of the global state for that. They answer with sums
(`motley.methods.evaluation`), as in a collection. A size's score is the mean over the clients of
that size that were asked. A size of which no client was asked has no score in that round. Clients
that have never trained are left out: their private tensors are random.

With [privacy], clients are not asked, because no noise protects a score (`privacy.reveal_scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from motley.core.part import take
from motley.engine.base import Job
from motley.evaluate import OwnModelScores
from motley.methods.base import Collection, ServerAlgorithm, mean_reported
from motley.methods.evaluation import CORRECT, SEEN
from motley.server.collection import CollectionResult
from motley.server.state import ServerState
from motley.server.validation import sums_error


@dataclass(frozen=True)
class EvaluateOwnModels:
    """Ask clients for the scores of their own models after every evaluated round.

    size_of: (client, round) -> the client's size.
    num_clients: the number of all clients, who are asked; None: only the clients of the round are.
    sends_parts: whether clients need their parts of the global state, to complete private tensors.
    """

    algorithm: ServerAlgorithm
    size_of: Callable[[int, int], str]
    num_clients: int | None = None
    sends_parts: bool = False
    phase: str = "evaluate"

    def jobs(self, server: ServerState, sampled: Sequence[int]) -> list[Job]:
        """Return jobs for the clients that have a model of their own."""
        split = self.algorithm.info.split
        number = server.round_number
        if not self.algorithm.info.is_evaluated(number):
            return []
        jobs = []
        for client in sampled if self.num_clients is None else range(self.num_clients):
            trained = server.client_state_rounds.get(client)
            if trained is None:
                continue
            size = self.size_of(client, number)
            part = take(server.model, split.evaluated(size, number)) if self.sends_parts else {}
            job = Job(
                round_number=number,
                client=client,
                size=size,
                state=part,
                broadcast=self.algorithm.evaluation_broadcast(server.method_state),
                client_state_round=trained,
                collection="evaluation",
            )
            jobs.append(job)
        return jobs

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Say why a client's sums cannot be used; None if they can."""
        info = self.algorithm.info
        return sums_error(info.task, info.classes, collection.values)

    def apply(self, server: ServerState, collections: Sequence[Collection]) -> CollectionResult:
        """Return the scores, and as metrics how far clients' accuracies are apart (their standard
        deviation over all clients that were asked) and the means of their other numbers.
        """
        info = self.algorithm.info
        sums = []
        for size in self.algorithm.info.split.sizes:
            for collection in collections:
                if collection.size == size:
                    sums.append((size, collection.values))
        reported = mean_reported(collection.values for collection in collections)
        metrics = {f"method/{name}": number for name, number in reported.items()}
        if info.task.has_classes:
            accuracies = [values[CORRECT].sum() / values[SEEN].sum() for _, values in sums]
            metrics["own-models/accuracy_std"] = torch.stack(accuracies).std(correction=0)
        scores = OwnModelScores(sums, info.task, classes=info.classes)
        return CollectionResult(server, scores, metrics)
