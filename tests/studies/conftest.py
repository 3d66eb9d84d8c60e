"""A study of two methods that runs in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

SWEEP = """
summary = "two methods on digits"
preset = "digits-small"
seeds = [1, 2]
set.training.rounds = 3
set.training.epochs = 1
set.federation = { clients = 6, clients_per_round = 3 }

[[data]]
name = "digits"

[[cases]]
name = "alpha 1"
set.data.partition.alpha = 1.0

[[methods]]
name = "HeteroAvg"
paper.digits = ["50 ± 2"]

[[methods]]
name = "InCoAvg"
against = "HeteroAvg"

[[methods]]
name = "FedIN"
set.method.name = "not-built"
paper.digits = [80]
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the file of a small study."""
    file = tmp_path / "mine.toml"
    file.write_text(SWEEP)
    return file
