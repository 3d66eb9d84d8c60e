"""A grid of nodes without processes, for all tests of Flower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.flower.grid import Grid


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grid:
    """Return a grid of three honest nodes. Flower is imported here: some tests run without it."""
    from tests.flower.grid import Grid, write_nodes

    monkeypatch.setattr("motley.flower.engine.POLL_S", 0.01)
    monkeypatch.setattr("motley.flower.nodes.POLL_S", 0.01)
    monkeypatch.setattr("flwr.supercore.task_identity.TaskIdentity._run_id", 1)
    monkeypatch.setattr("flwr.supercore.task_identity.TaskIdentity._node_id", 1)
    monkeypatch.setattr("flwr.supercore.task_identity.TaskIdentity._task_id", 1)
    return Grid(write_nodes(tmp_path / "nodes"))
