"""A run with InCo that keeps all its checkpoints, created once per session. Tests only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.conftest import small_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three rounds with three checkpoints."""
    path = tmp_path_factory.mktemp("analysis") / "run"
    return small_run(
        path, "method.name=InCoAvg", "run.keep_checkpoints=5", "run.checkpoint_every=1"
    )
