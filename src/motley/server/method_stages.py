"""The method's own stages: its aggregation, its correction, and its work on the new state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.results import require_fit, require_metrics, require_tensors
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
        _check_aggregate("aggregate", self.algorithm, aggregate, server)
        updated: object = self.algorithm.update(server.method_state, server.state, updates)
        method_state = require_tensors(updated, _hook("update", self.algorithm))
        numbers: object = self.algorithm.metrics(method_state, updates)
        metrics = require_metrics(numbers, _hook("metrics", self.algorithm))
        metrics |= require_metrics(aggregate.metrics, _hook("aggregate", self.algorithm))
        return StageResult(replace(server, method_state=method_state), aggregate, metrics)


@dataclass(frozen=True)
class MethodCorrection:
    """Let the method adjust the aggregated delta before it is applied (FedDyn's h)."""

    algorithm: ServerAlgorithm
    name: str = "method-correction"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Adjust the delta with the method state after this round's update."""
        adjusted = self.algorithm.adjust_aggregate(server.method_state, aggregate)
        _check_aggregate("adjust_aggregate", self.algorithm, adjusted, server)
        return StageResult(server, adjusted)


@dataclass(frozen=True)
class PostProcess:
    """Let the method work on the new global state, for example by distillation."""

    algorithm: ServerAlgorithm
    name: str = "post-process"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Replace the global state by the method's post-processed one."""
        hook = _hook("post_process", self.algorithm)
        result: object = self.algorithm.post_process(server.method_state, server.state, updates)
        if not isinstance(result, tuple) or len(result) != 2:
            raise MotleyError(
                f"{hook} returned {describe(result)}; a pair of the global state and metrics is "
                "expected."
            )
        state = require_fit(result[0], server.state, hook, "global state", complete=True)
        return StageResult(
            replace(server, state=state), aggregate, require_metrics(result[1], hook)
        )


def _hook(hook: str, algorithm: ServerAlgorithm) -> str:
    return f"{hook} of {type(algorithm).__name__}"


def _check_aggregate(
    hook: str, algorithm: ServerAlgorithm, aggregate: object, server: ServerState
) -> None:
    """Check the result of a hook that returns an aggregate."""
    if not isinstance(aggregate, Aggregate):
        raise MotleyError(
            f"{_hook(hook, algorithm)} returned {describe(aggregate)}; a "
            "motley.core.merge.Aggregate is expected."
        )
    require_fit(aggregate.delta, server.state, _hook(hook, algorithm), "delta")
