"""Recalibrated BatchNorm statistics: computed with the evaluated model on all clients' data.

A round averages the running statistics of a few clients, whose labels are skewed and whose weights
differ from the merged model's. Recalibration (`server.statistics.name = "recalibrate"`) replaces
the result. Every client gets its part of the model that will be evaluated, passes its examples
through it once, without augmentation and in single precision, and reports per BatchNorm layer and
channel

    n = number of the layer's inputs,    s = sum of the inputs,    q = sum of their squares.

The server adds these up over clients, N = sum n, S = sum s, Q = sum q, and sets

    running_mean = S / N,    running_var = (Q - S^2 / N) / (N - 1).

These are the mean and the unbiased variance of all inputs together (`torch.var` of their
concatenation, and the law of total variance for any sizes of clients). The mean of the clients'
variances would leave out how far apart their means are. A coordinate is pooled over the clients
that hold it: the clients of one size with split.normalization_statistics = "per-size", those of all
sizes that share it with "shared".

In the pass, each BatchNorm normalizes with the statistics of the current batch, as in training and
as HeteroFL's static batch norm does. The inputs of the first BatchNorm do not depend on that, so
its statistics are exact. Those of deeper layers are the statistics of inputs that were normalized
batch by batch. Statistics that fit the final model exactly would take one pass per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motley.core.part import Part, State, add_at, take
from motley.engine.base import Job
from motley.methods.base import Collection
from motley.models.moments import COUNT, MOMENTS, SQUARES, SUM, layers_in
from motley.server.collection import CollectionResult
from motley.server.state import ServerState
from motley.server.validation import moments_error
from motley.splits.base import Split


@dataclass(frozen=True)
class Recalibrate:
    """Replace the running statistics of the evaluated model by statistics of the clients' data.

    is_due: round -> whether statistics are recalibrated after it.
    num_clients: the number of all clients, who are asked; None: only the clients of the round are.
    size_of: (client, round) -> the client's size.
    """

    split: Split
    size_of: Callable[[int, int], str]
    is_due: Callable[[int], bool]
    num_clients: int | None = None
    phase: str = "collect"

    def jobs(self, server: ServerState, sampled: Sequence[int]) -> list[Job]:
        """Return jobs for the clients, with their parts of the evaluated model."""
        number = server.round_number
        if not self.is_due(number):
            return []
        clients = sampled if self.num_clients is None else range(self.num_clients)
        jobs = []
        for client in clients:
            size = self.size_of(client, number)
            state = take(server.model, self.split.evaluated(size, number))
            job = Job(
                round_number=number,
                client=client,
                size=size,
                state=state,
                client_state_round=server.client_state_rounds.get(client),
                collection="statistics",
            )
            jobs.append(job)
        return jobs

    def error(self, server: ServerState, collection: Collection) -> str | None:
        """Say why a client's report cannot be used; None if it can."""
        part = self.split.evaluated(collection.size, server.round_number)
        return moments_error(server.model, part, collection.values)

    def apply(self, server: ServerState, collections: Sequence[Collection]) -> CollectionResult:
        """Pool the clients' reports into the evaluated model."""
        reports = []
        for collection in collections:
            part = self.split.evaluated(collection.size, server.round_number)
            reports.append((part, collection.values))
        return CollectionResult(server.with_model(pool(server.model, reports)))


def pool(model: State, reports: Sequence[tuple[Part, State]]) -> State:
    """Return a model with the running statistics of all clients' inputs together.

    A report is a client's part of the model with its moments (`batch_moments`). Coordinates that no
    client reported keep their statistics, and so do those whose pooled statistics are not finite:
    no client could train from such a state.
    """
    totals: dict[str, State] = {}
    variances: dict[str, str] = {}
    for part, moments in reports:
        for prefix in layers_in(moments):
            piece = part[f"{prefix}running_mean"]
            if piece.name not in totals:
                like = model[piece.name]
                totals[piece.name] = {
                    name: torch.zeros_like(like, dtype=torch.float64) for name in MOMENTS
                }
                variances[piece.name] = part[f"{prefix}running_var"].name
            for name in MOMENTS:
                add_at(totals[piece.name][name], piece.index, moments[prefix + name])
    after = dict(model)
    for mean_name, total in totals.items():
        variance_name = variances[mean_name]
        mean, variance = mean_and_variance(total[COUNT], total[SUM], total[SQUARES])
        mean, variance = mean.to(model[mean_name].dtype), variance.to(model[variance_name].dtype)
        usable = (total[COUNT] > 1) & mean.isfinite() & variance.isfinite()
        after[mean_name] = torch.where(usable, mean, model[mean_name])
        after[variance_name] = torch.where(usable, variance, model[variance_name])
    return after


def mean_and_variance(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return S / N and (Q - S^2 / N) / (N - 1), the mean and the unbiased variance of N numbers."""
    mean = total / count
    variance = (squares - total * mean) / (count - 1)
    return mean, variance.clamp(min=0.0)  # rounding can make the variance of equal numbers negative
