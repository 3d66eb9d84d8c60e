"""The stage that scales the aggregated delta before anything else sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState


@dataclass(frozen=True)
class Scale:
    """Multiply the delta of all parameters by `factor`. Buffers are not scaled.

    InCo's authors divide the deltas of ViTs by the number of local epochs before they mix layers.
    That is not the same as a server learning rate after InCo, whose limits and epsilon are in units
    of the delta.
    """

    parameters: Collection[str]
    factor: float
    name: str = "scale"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return the scaled delta."""
        delta = dict(aggregate.delta)
        for name in delta:
            if name in self.parameters:
                delta[name] = delta[name] * self.factor
        return StageResult(server, aggregate.with_delta(delta))
