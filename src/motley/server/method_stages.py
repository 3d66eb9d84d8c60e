"""The method's own stages: its aggregation, its correction, and its work on the new state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.methods.base import ServerAlgorithm
from motley.server.pipeline import StageResult
from motley.server.state import ServerState


@dataclass(frozen=True)
class AggregateUpdates:
    """Compute the mean delta, and the method's server state after the round.

    Both see the global state that the clients started from.
    """

    algorithm: ServerAlgorithm
    name: str = "method"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Ignore the aggregate so far: there is none yet."""
        aggregate = self.algorithm.aggregate(server.method_state, server.state, updates)
        if not isinstance(aggregate, Aggregate):
            raise self._wrong("aggregate", aggregate, "a motley.core.merge.Aggregate")
        method_state = self.algorithm.update(server.method_state, server.state, updates)
        if not isinstance(method_state, Mapping):
            raise self._wrong("update", method_state, "a mapping of tensors")
        metrics = {**self.algorithm.metrics(method_state, updates), **aggregate.metrics}
        return StageResult(replace(server, method_state=method_state), aggregate, metrics)

    def _wrong(self, hook: str, result: object, expected: str) -> MotleyError:
        algorithm = type(self.algorithm).__name__
        return MotleyError(
            f"{hook} of {algorithm} returned {describe(result)}; {expected} is expected."
        )


@dataclass(frozen=True)
class MethodCorrection:
    """Let the method adjust the aggregated delta before it is applied (FedDyn's h)."""

    algorithm: ServerAlgorithm
    name: str = "method-correction"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Adjust the delta with the method state after this round's update."""
        return StageResult(server, self.algorithm.adjust_aggregate(server.method_state, aggregate))


@dataclass(frozen=True)
class PostProcess:
    """Let the method work on the new global state, for example by distillation."""

    algorithm: ServerAlgorithm
    name: str = "post-process"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Replace the global state by the method's post-processed one."""
        state, metrics = self.algorithm.post_process(server.method_state, server.state, updates)
        return StageResult(replace(server, state=state), aggregate, metrics)
