"""Nodes end with the recorded result of the local engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.flower.server import serve
from tests.flower.grid import Grid, three_nodes
from tests.test_pinned import BRIEF, RECORDED, hash_of, machine


def test_nodes_end_at_the_recorded_result(grid: Grid, tmp_path: Path) -> None:
    _, server = serve(grid, three_nodes(*BRIEF), tmp_path / "run")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert server.round_number == 2
    if machine() == recorded["machine"]:
        assert hash_of(server) == recorded["cases"]["three-clients"]["hash"]
