"""The aggregation pipeline: a list of stages that turn client updates into a new server state.

The order of the stages is the order of the list, which `assembly.build_pipeline` puts together:

    AggregateUpdates -> Scale -> InCo -> MethodCorrection -> ServerOptimizer -> Apply -> PostProcess
    -> EMA

A stage is called with the server state, the aggregated delta so far and the accepted updates, and
returns what it changes. It never modifies its arguments. To add one of your own, write a class like
this, and insert an instance into `federation.pipeline`:

    import torch
    from motley.server.pipeline import StageResult

    class ClipAggregate:
        name = "clip"

        def __init__(self, parameters):
            self.parameters = parameters  # not buffers: running statistics are never corrected

        def __call__(self, server, aggregate, updates):
            delta = dict(aggregate.delta)
            clipped = [name for name in delta if name in self.parameters]
            norm = torch.nn.utils.get_total_norm([delta[name] for name in clipped])
            for name in clipped:
                delta[name] = delta[name] * (1.0 / norm).clamp(max=1.0)
            return StageResult(server, aggregate.with_delta(delta), {"norm": norm})

    names = [stage.name for stage in federation.pipeline]
    federation.pipeline.insert(names.index("apply"), ClipAggregate(federation.split.parameters))

The place matters: `Apply` adds the delta to the global state, so a stage after it that changes the
delta is an error. Before "optimizer", if there is one, a stage
sees the clients' mean delta; between "optimizer" and "apply", the optimizer's step. The metric of
this example is `record.metrics["clip/norm"]`. A round without an accepted update runs no stage and
has no metrics.

Stages may be queued behind a GPU that is still training (`speculation.py`), so they must not read a
value from the device: no `.item()`, no `if` on a tensor. Metrics are returned as tensors and are
read later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.server.metrics import Metrics
from motley.server.state import ServerState


@dataclass(frozen=True)
class StageResult:
    """What a stage returns: both its inputs, changed or not, and numbers for the round's record.

    applied: whether this stage has added the aggregate to the global state. A later stage that
        changes the aggregate would have no effect, so it is an error.
    """

    server: ServerState
    aggregate: Aggregate
    metrics: Metrics = field(default_factory=dict)
    applied: bool = False


class Stage(Protocol):
    """One step of the aggregation.

    `name` prefixes the stage's metrics. A stage may also keep tensors between rounds under its
    name: it reads `server.stage_states.get(name, {})`, and returns `server.with_stage_state(name,
    ...)`. Checkpoints save them.
    """

    @property
    def name(self) -> str:
        """The stage's name; no other stage of the pipeline has it."""
        ...

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Run the stage. `server.round_number` is the number of the current round."""
        ...


def run_stages(
    stages: Sequence[Stage], server: ServerState, updates: Sequence[ClientUpdate]
) -> tuple[ServerState, Metrics]:
    """Run all stages in order; return the server state after them, and metrics as NAME/METRIC."""
    aggregate = Aggregate({}, {})
    metrics: dict[str, Tensor | float] = {}
    applied = False
    for stage in stages:
        result = stage(server, aggregate, updates)
        if applied and result.aggregate is not aggregate:
            raise MotleyError(
                f"stage {stage.name!r} changes the aggregated delta after it was applied to the "
                "global state, which has no effect. Insert it before the stage 'apply'."
            )
        applied = applied or result.applied
        server, aggregate = result.server, result.aggregate
        for metric, value in result.metrics.items():
            metrics[f"{stage.name}/{metric}"] = value
    return server, metrics
