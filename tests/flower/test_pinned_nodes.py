"""Nodes end with the recorded result of the local engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.flower.server import serve
from tests.flower.grid import Grid, three_nodes
from tests.test_pinned import BRIEF, hash_of, read_recorded


def test_nodes_end_at_the_recorded_result(grid: Grid, tmp_path: Path) -> None:
    _, server = serve(grid, three_nodes(*BRIEF), tmp_path / "run")
    recorded = read_recorded()
    assert server.round_number == 2
    if recorded.exact:
        assert hash_of(server) == recorded.cases["three-clients"]["hash"]
