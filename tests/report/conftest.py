"""Small runs and a study, created once per session. Tests only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.config import load_config
from motley.runs.run import start_run
from motley.studies.declaration import load_study
from motley.studies.results import collect, save
from motley.studies.runner import StudyWatcher, run_study, unfinished_runs
from motley.studies.sweep import plan_cells
from tests.studies.conftest import SWEEP

SMALL = (
    "training.rounds=3",
    "training.epochs=1",
    "federation.clients=6",
    "federation.clients_per_round=3",
)


def small_run(path: Path, *overrides: str) -> Path:
    """Run three rounds and return the run's folder."""
    overrides = (*SMALL, "run.tensorboard=false", *overrides)
    start_run(load_config(preset="digits-small", overrides=overrides), path)
    return path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return runs of two methods, the first with two seeds."""
    folder = tmp_path_factory.mktemp("report")
    return [
        small_run(folder / "one", "method.name=HeteroAvg", "seed=1"),
        small_run(folder / "two", "method.name=HeteroAvg", "seed=2"),
        small_run(folder / "three", "method.name=InCoAvg"),
    ]


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished study."""
    folder = tmp_path_factory.mktemp("study")
    file = folder / "mine.toml"
    file.write_text(SWEEP)
    cells = plan_cells(load_study(str(file)), "full")
    run_study(unfinished_runs(cells, folder), folder, StudyWatcher())
    return save(load_study(str(file)), "full", cells, collect(cells, folder), folder)
