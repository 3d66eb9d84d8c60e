"""Nodes train on other inputs than images, with the task of the federation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.config import Config
from motley.data.dataset import DATASETS
from motley.flower.server import serve
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog, metric_of
from motley.runs.run import start_run
from tests.flower.grid import Grid
from tests.test_tasks import CASES, config_of, data_of

CASE = "regression"
SIZES = CASES[CASE][0]


@pytest.fixture
def toy() -> Iterator[str]:
    """Register the toy data set of a regression, for one test."""
    _, _, shape, task, outputs, _ = CASES[CASE]
    DATASETS.register("toy", "a toy")(lambda source: data_of(shape, task, outputs))
    yield "toy"
    del DATASETS._entries["toy"]


def config(engine: str) -> Config:
    nodes = ("federation.clients=3", "federation.clients_per_round=3", "run.tensorboard=false")
    quick = ("engine.flower.wait_s=0.01", "engine.flower.timeout_s=0.05") * (engine == "flower")
    task = ("task.loss=huber", "task.metrics=mae,rmse", "data.name=toy")
    return config_of(CASE, *nodes, *quick, *task, f"engine.name={engine}")


def test_nodes_train_a_regression_with_the_local_engines_bits(
    grid: Grid, toy: str, tmp_path: Path
) -> None:
    files = {}
    for client, size in enumerate(SIZES):
        file = tmp_path / f"regression-{client}" / "node.toml"
        file.parent.mkdir()
        data = f'[data]\nname = "{toy}"\ndealt = true\n'
        file.write_text(f'client = {client}\nsize = "{size}"\n{data}')
        files[1000 - client] = file
    grid.nodes = files
    _, server = serve(grid, config("flower"), tmp_path / "run")
    _, expected = start_run(config("local"), tmp_path / "local")
    assert fingerprint(server.state) == fingerprint(expected.state)
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert not any("refused" in line for line in lines)
    assert metric_of(lines).name == "mae" and list(lines[-1]["scores"]) == ["mae", "rmse"]
