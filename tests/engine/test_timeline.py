"""Turns in slots, as spans and as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.engine.timeline import Timeline, draw
from motley.federation import Federation
from motley.runs.run import start_run
from tests.conftest import tiny_config


def test_every_turn_is_a_span_and_a_slot_holds_one_client_at_a_time() -> None:
    federation = Federation(tiny_config("engine.slots=2", "federation.clients_per_round=6"))
    timeline = Timeline(federation.device)
    federation.engine.record(timeline)  # type: ignore[attr-defined]
    server, first = federation.run_round(federation.initial_state())
    _, second = federation.run_round(server)
    spans = timeline.spans()
    assert sorted((span.round_number, span.client) for span in spans) == sorted(
        (record.round_number, client) for record in (first, second) for client in record.clients
    )
    assert all(0 <= span.start < span.end for span in spans)
    assert all(span.size == federation.sizes[span.client] for span in spans)
    for slot in {span.slot for span in spans}:
        own = sorted((span.start, span.end) for span in spans if span.slot == slot)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))


def test_a_profiled_run_leaves_a_picture(tmp_path: Path) -> None:
    start_run(tiny_config("training.steps=1"), tmp_path / "run", profile=True)
    picture = (tmp_path / "run" / "timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_the_debug_engine_has_no_slots_to_draw(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match="debug"):
        start_run(tiny_config("engine.name=debug"), tmp_path / "run", profile=True)
    assert not (tmp_path / "run").exists()


def test_only_the_last_rounds_are_drawn(tmp_path: Path) -> None:
    federation = Federation(tiny_config("training.steps=1"))
    timeline = Timeline(federation.device)
    federation.engine.record(timeline)  # type: ignore[attr-defined]
    server = federation.initial_state()
    for _ in range(4):
        server, _ = federation.run_round(server)
    draw(timeline.spans(), tmp_path / "few.png", rounds=1)
    draw(timeline.spans(), tmp_path / "all.png", rounds=4)
    assert (tmp_path / "few.png").stat().st_size < (tmp_path / "all.png").stat().st_size
