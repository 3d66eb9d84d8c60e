"""The aggregation pipeline: its order, stages of one's own, their metrics and their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.utils import get_total_norm

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.runs.checkpoint import load_checkpoint, save_checkpoint
from motley.server.inco import IncoSettings, inco
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


# ---- the scale of the delta, and the layers that InCo refines

VIT = (
    "model.sizes=['vit1','vit2']",
    "model.vit={dim=16, heads=2, patch=4}",
    "server.ema_decay=0",
)
OFFICIAL = "server.inco.variant=official"


def after_one_round(*overrides: str) -> tuple[Federation, ServerState, ServerState]:
    federation = Federation(tiny_config(*BRIEF, *VIT, *overrides))
    server = federation.initial_state()
    return federation, server, federation.run_round(server)[0]


def test_deltas_are_scaled_before_inco() -> None:
    """InCo's authors divide the deltas of ViTs by their 5 epochs before they mix layers."""
    plain, server, whole = after_one_round()
    _, _, scaled = after_one_round(OFFICIAL, "server.delta_scale=0.2")
    _, _, late = after_one_round(OFFICIAL, "server.lr=0.2")
    fifth = {name: 0.2 * (whole.state[name] - server.state[name]) for name in whole.state}
    settings = IncoSettings(variant="official")
    expected, coefficients = inco(fifth, plain.split.cross_layers, settings)
    assert coefficients.keys() == {"blocks.0.norm2.weight", "blocks.1.norm2.weight"}
    for name, delta in expected.items():
        torch.testing.assert_close(
            scaled.state[name] - server.state[name], delta, rtol=1e-3, atol=1e-7
        )
    refined = "blocks.0.norm2.weight"
    distance = (scaled.state[refined] - late.state[refined]).norm() / fifth[refined].norm()
    assert distance > 0.05, "a server learning rate after InCo is another method"


def test_without_inco_the_scale_is_a_server_learning_rate() -> None:
    _, _, scaled = after_one_round("server.delta_scale=0.25")
    _, _, late = after_one_round("server.lr=0.25")
    for name, tensor in late.state.items():
        torch.testing.assert_close(scaled.state[name], tensor, rtol=1e-6, atol=1e-8)


def test_buffers_are_not_scaled() -> None:
    ends = []
    for scale in (1.0, 0.5):
        federation = Federation(tiny_config(*BRIEF, f"server.delta_scale={scale}"))
        ends.append(federation.run_round(federation.initial_state())[0].state)
    buffers = ends[0].keys() - federation.split.parameters
    assert buffers and all(torch.equal(ends[0][name], ends[1][name]) for name in buffers)


def test_incos_vit_preset_scales_first() -> None:
    server = load_config(preset="inco-vit-cifar10").server
    assert (server.delta_scale, server.lr) == (0.2, 1.0)


def test_inco_refines_all_layers_of_one_shape_if_told_to() -> None:
    federation, server, _ = after_one_round(OFFICIAL, "server.inco.layers=same-shape")
    _, record = federation.run_round(server)
    refined = {
        name.removeprefix("inco/").removesuffix("/theta")
        for name in record.metrics
        if name.startswith("inco/") and name.endswith("/theta")
    }
    assert refined == {
        *(
            f"blocks.{norm}.{key}"
            for norm in ("0.norm2", "1.norm1", "1.norm2")
            for key in ("weight", "bias")
        ),
        *(
            f"blocks.1.{layer}.{key}"
            for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
            for key in ("weight", "bias")
        ),
    }


def test_layers_of_one_shape_are_found_in_narrow_models_too() -> None:
    federation = Federation(
        tiny_config(
            *BRIEF,
            "split={name='width', rates=[1, 0.5]}",
            "model.sizes=['resnet14']",
            "server.inco={variant='paper', layers='same-shape'}",
        )
    )
    _, record = federation.run_round(federation.initial_state())
    assert "inco/layer1.0.conv2.weight/theta" in record.metrics
