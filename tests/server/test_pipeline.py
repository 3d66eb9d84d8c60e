"""The aggregation pipeline: its order, stages of one's own, their metrics and their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.utils import get_total_norm

from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.runs.checkpoint import load_checkpoint, save_checkpoint
from motley.server.pipeline import StageResult, run_stages
from motley.server.state import ServerState
from tests.conftest import tiny_config

BRIEF = ("training.steps=1", "evaluation.every=3")


@dataclass(frozen=True)
class ClipAggregate:
    """Scales the aggregated delta down to a norm, and counts the rounds in which it did."""

    max_norm: float
    name: str = "clip"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        norm = get_total_norm(
            [tensor for tensor in aggregate.delta.values() if tensor.is_floating_point()]
        )
        factor = (self.max_norm / norm).clamp(max=1.0)
        delta = {}
        for name, tensor in aggregate.delta.items():
            delta[name] = tensor * factor if tensor.is_floating_point() else tensor
        counter = server.stage_states.get(self.name, {}).get("clipped", torch.zeros(()))
        server = server.with_stage_state(self.name, {"clipped": counter + (factor < 1)})
        return StageResult(
            server, aggregate.with_delta(delta), {"norm": norm, "limit": self.max_norm}
        )


def test_a_stage_of_ones_own_sees_the_delta_and_reports_numbers() -> None:
    federation = Federation(tiny_config(*BRIEF))
    federation.pipeline.insert(1, ClipAggregate(0.01))
    server = federation.initial_state()
    after, record = federation.run_round(server)
    assert record.metrics["clip/norm"] > 0.01 == record.metrics["clip/limit"]
    moved = [
        after.state[name] - tensor
        for name, tensor in server.state.items()
        if tensor.is_floating_point()
    ]
    assert float(get_total_norm(moved)) <= 0.01 * 1.001


def test_a_stage_that_changes_the_delta_too_late_is_refused() -> None:
    federation = Federation(tiny_config(*BRIEF))
    federation.pipeline.append(ClipAggregate(0.01))
    with pytest.raises(MotleyError, match=r"stage 'clip' changes .* before the stage 'apply'"):
        federation.run_round(federation.initial_state())


def test_a_stages_state_is_kept_between_rounds_and_in_checkpoints(tmp_path: Path) -> None:
    federation = Federation(tiny_config(*BRIEF))
    federation.pipeline.insert(1, ClipAggregate(0.01))
    server = federation.initial_state()
    for _ in range(2):
        server, _ = federation.run_round(server)
    assert float(server.stage_states["clip"]["clipped"]) == 2
    save_checkpoint(tmp_path, server, keep=1)
    saved = load_checkpoint(tmp_path)
    assert saved is not None and float(saved.stage_states["clip"]["clipped"]) == 2


def test_the_order_of_stages() -> None:
    settings = (
        "server.inco.variant=official",
        "server.optimizer.name=adam",
        "server.ema_decay=0.9",
    )
    federation = Federation(tiny_config(*settings))
    names = [type(stage).__name__ for stage in federation.pipeline]
    assert names == [
        "AggregateUpdates",
        "InCo",
        "MethodCorrection",
        "ServerOptimizer",
        "Apply",
        "PostProcess",
        "EMA",
    ]
    assert len({stage.name for stage in federation.pipeline}) == len(names)
    plain = Federation(tiny_config("server.ema_decay=0"))
    names = [type(stage).__name__ for stage in plain.pipeline]
    assert names == ["AggregateUpdates", "MethodCorrection", "Apply", "PostProcess"]


def test_stages_leave_the_server_state_they_get_as_it_is() -> None:
    settings = ("method.name=feddyn", "server.inco.variant=official", "server.optimizer.name=yogi")
    federation = Federation(tiny_config(*settings, "server.ema_decay=0.9", *BRIEF))
    server, _ = federation.run_round(federation.initial_state())
    copy = server.map_tensors(torch.clone)
    federation.run_round(server)
    sections = [(server.state, copy.state), (server.ema or {}, copy.ema or {})]
    sections.append((server.method_state, copy.method_state))
    sections.append((server.stage_states["optimizer"], copy.stage_states["optimizer"]))
    for before, after in sections:
        assert before and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_without_stages_nothing_changes() -> None:
    server = ServerState(1, {"w": torch.ones(2)})
    assert run_stages([], server, []) == (server, {})
