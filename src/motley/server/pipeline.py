"""The aggregation pipeline: a list of stages that turn client updates into a new server state.

The order of the stages is the order of the list, which `assembly.build_pipeline` puts together:

    AggregateUpdates -> Scale -> InCo -> MethodCorrection -> ServerOptimizer -> Apply -> PostProcess
    -> EMA

Models that have a tensor under two names add a stage `Tie` before the EMA.

A stage is called with the server state, the aggregated delta so far and the accepted updates, and
returns a new state and a new aggregate. It never modifies its arguments. To add one of your own,
write a class like this:

    import torch
    from motley import ServerStage, StageResult, StageSettings

    class ClipSettings(StageSettings):
        max_norm: float = 1.0

    class ClipAggregate(ServerStage):
        Settings = ClipSettings
        name = "clip"

        def __call__(self, server, aggregate, updates):
            delta = dict(aggregate.delta)
            # Not buffers: running statistics are never corrected.
            clipped = [name for name in delta if name in self.split.parameters]
            norm = torch.nn.utils.get_total_norm([delta[name] for name in clipped])
            for name in clipped:
                delta[name] = delta[name] * (self.settings.max_norm / norm).clamp(max=1.0)
            return StageResult(server, aggregate.with_delta(delta), {"norm": norm})

and name it in the configuration:

    [[server.stages]]
    name = "my_module:ClipAggregate"
    max_norm = 0.5

`federation.pipeline` is the list itself, to which any object with a `name` can be added.

The place matters. `Apply` adds the delta to the global state, so a stage after it that changes the
delta is an error. Before "optimizer", if there is one, a stage sees the clients' mean delta;
between "optimizer" and "apply", the optimizer's step.

A stage with `sees_updates = False` in its class is called with an empty sequence of updates. With
`[privacy]`, others are refused, because epsilon is computed for the mean delta.

The metric of this example is `record.metrics["clip/norm"]`. A round without an accepted update runs
no stage and has no metrics.

Stages may be queued behind a GPU that is still training (`speculation.py`), so they must not read a
value from the device: no `.item()`, no `if` on a tensor. Metrics are returned as tensors and are
read later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from motley.core.dotted import check_arguments, describe, subclass_of
from motley.core.errors import MotleyError, unknown
from motley.core.merge import Aggregate
from motley.core.registry import Registry
from motley.core.results import require_fit, require_metrics
from motley.core.update import ClientUpdate
from motley.server.metrics import Metrics
from motley.server.state import ServerState
from motley.settings import Configured, RegistryChoice, Settings
from motley.splits import Split


@dataclass(frozen=True)
class StageResult:
    """The result of a stage: both its inputs, changed or not, and numbers for the round's record.

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
        without_updates = isinstance(stage, ServerStage) and not stage.sees_updates
        result = stage(server, aggregate, () if without_updates else updates)
        if not isinstance(result, StageResult):
            raise MotleyError(
                f"stage {stage.name!r} returned {describe(result)}; a motley.StageResult is "
                "expected."
            )
        if isinstance(stage, ServerStage):
            _check_result(stage.name, result, aggregate, server)
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


def _check_result(
    name: str, result: StageResult, aggregate: Aggregate, server: ServerState
) -> None:
    """Check the result of a user's stage, whose mistakes would show up in later stages."""
    stage = f"stage {name!r}"
    if not isinstance(result.server, ServerState) or not isinstance(result.aggregate, Aggregate):
        raise MotleyError(
            f"{stage} returned StageResult({describe(result.server)}, "
            f"{describe(result.aggregate)}); a server state and an aggregate are expected."
        )
    require_metrics(result.metrics, stage)
    if result.aggregate is not aggregate:
        require_fit(result.aggregate.delta, server.state, stage, "delta")
    if result.server is not server:
        require_fit(result.server.state, server.state, stage, "global state", complete=True)


# ---- stages of users' own


class StageSettings(Settings):
    """A stage of your own. Its class may add keys."""

    name: str
    """The dotted path of the stage's class."""
    before: str = "apply"
    """The stage before which it runs: scale, inco, method-correction, optimizer, apply,
    post-process, ema, or another one of yours. "end": after all others.
    """


class ServerStage(ABC):
    """The base class of users' stages."""

    Settings: ClassVar[type[StageSettings]] = StageSettings
    #: Prefixes the stage's metrics. No other stage of the pipeline has it.
    name: str = ""
    #: False: the stage is called without updates, because the mean delta is enough for it. Only
    #: such stages are allowed with `[privacy]`.
    sees_updates: ClassVar[bool] = True

    def __init__(self, settings: Any, split: Split) -> None:
        """Keep the settings, and the split, which tells parameters from buffers."""
        self.settings, self.split = settings, split
        self.name = self.name or type(self).__name__.lower()

    @classmethod
    def configure(cls, **settings: Any) -> Configured:
        """Return the stage with its settings, for `motley.Federation(server=[...])`."""
        return Configured(cls, settings)

    @abstractmethod
    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Run the stage; see `Stage`."""


def _accept(item: Any) -> type[ServerStage]:
    stage: type[ServerStage] = subclass_of(ServerStage, "motley.ServerStage")(item)
    if not issubclass(stage.Settings, StageSettings):
        raise MotleyError(
            f"its Settings are {describe(stage.Settings)}; "
            "a subclass of motley.StageSettings is expected."
        )
    arguments = ("self", "server", "aggregate", "updates")
    check_arguments(stage.__call__, arguments, f"{stage.__name__}.__call__")
    return stage


STAGES: Registry[type[ServerStage]] = Registry(
    "server stage", group="motley.stages", accept=_accept
)
#: Chosen by the name of an entry of server.stages.
STAGE = RegistryChoice("", STAGES, lambda stage: stage.Settings)


def insert_stages(
    pipeline: list[Stage], chosen: Sequence[StageSettings], split: Split
) -> list[Stage]:
    """Return a pipeline with users' stages in their places."""
    result = list(pipeline)
    for number, settings in enumerate(chosen):
        stage = STAGES[settings.name](settings, split)
        names = [other.name for other in result]
        where = f"server.stages.{number}"
        if stage.name in names:
            raise MotleyError(f"{where}: there is already a stage {stage.name!r} in the pipeline.")
        if settings.before == "end":
            result.append(stage)
        elif settings.before in names:
            result.insert(names.index(settings.before), stage)
        else:
            raise MotleyError(
                f"{where}.before: {unknown('stage', settings.before, [*names, 'end'])}"
            )
    return result
