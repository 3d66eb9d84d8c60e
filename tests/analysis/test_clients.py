"""The score of each natural client of the test set, also of those that did not train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.analysis import ANALYSES
from motley.config import parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from tests.conftest import tiny_config
from tests.data.natural_files import write_writers


def test_writers_who_did_not_train_have_scores(tmp_path: Path) -> None:
    write_writers(tmp_path)
    overrides = [
        f"data.root={tmp_path}",
        "data.transform.resize=14",
        "model.sizes=['mlp1','mlp2']",
        "federation.clients=4",
        "federation.clients_per_round=2",
        "training.rounds=1",
    ]
    path = tmp_path / "run"
    start_run(resolve("mnist-writers", [parse_overrides(overrides)]), path)
    findings = ANALYSES["test-clients"]([path])
    assert [row[2:5] for row in findings.rows] == [
        ("mlp1", 4, 12),
        ("mlp1", 5, 12),
        ("mlp2", 4, 12),
        ("mlp2", 5, 12),
    ]
    # Both writers have as many digits, so the mean is the accuracy that the run reports.
    (line,) = MetricsLog(path / "metrics.jsonl").read()
    for size in ("mlp1", "mlp2"):
        scores = [row[5] for row in findings.rows if row[2] == size]
        assert np.isclose(np.mean(scores), line["accuracy"][size], atol=1e-6)
    assert len(findings.notes) == 2


def test_data_without_clients_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    start_run(tiny_config("training.rounds=1", "model.sizes=['mlp1','mlp2','mlp3']"), path)
    with pytest.raises(MotleyError, match="'digits', does not record whose test examples"):
        ANALYSES["test-clients"]([path])
