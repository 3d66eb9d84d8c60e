"""Flower's simulation engine, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

from tests.cli.conftest import call, overrides

SETTINGS = overrides("training.rounds=2", "method.name=scaffold", "run.tensorboard=false")


def test_simulated_nodes_end_with_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    simulated, local = tmp_path / "simulated", tmp_path / "local"
    assert call("run", *SETTINGS, "--engine", "flower-simulation", "--out", simulated).code == 0
    assert call("run", *SETTINGS, "--out", local).code == 0
    prints = [call("show", path, "--fingerprint").out for path in (simulated, local)]
    assert prints[0] == prints[1]
    assert call("resume", simulated).out.startswith("This run is already finished.")
