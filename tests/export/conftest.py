"""Runs that are exported, created once per session. Tests only read them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from motley.export.formats import FORMATS
from motley.runs.run import start_run
from tests.cli.conftest import call
from tests.conftest import tiny_config


class Export(NamedTuple):
    """An exported model, and what the command printed."""

    folder: Path
    out: str


FAST = ("training.epochs=0.5", "training.batch_size=64", "run.tensorboard=false")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two rounds with a moving average: its models are not the global state."""
    path = tmp_path_factory.mktemp("export") / "run"
    settings = ("model.sizes=['mlp1','mlp2']", "server.ema_decay=0.5", "training.rounds=2")
    # Images of 8x8 pixels are resized and normalized.
    transform = (
        "data.transform.resize=12",
        "data.transform.mean=[0.3]",
        "data.transform.std=[0.4]",
    )
    start_run(tiny_config(*FAST, *settings, *transform), path)
    return path


@pytest.fixture(scope="session")
def exits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose larger sizes have early exits."""
    path = tmp_path_factory.mktemp("exits") / "run"
    settings = (
        "method.name=scalefl",
        "model.sizes=['resnet10']",
        "split.name=grid",
        "split.cuts=[1,2,4]",
        "split.rates=[0.5,0.75,1]",
        "split.head=linear",
        "split.normalization_statistics=shared",
        "training.rounds=1",
    )
    start_run(tiny_config(*FAST, *settings), path)
    return path


@pytest.fixture(scope="session")
def exports(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Export]:
    """Return the size mlp2 of the run, exported in every format."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("exports")
    exports = {}
    for name in FORMATS:
        answer = call("export", run, "--size", "mlp2", "--format", name, "-o", folder / name)
        assert answer.code == 0, answer.err
        exports[name] = Export(folder / name, answer.out)
    return exports
