"""What tests of every kind may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from motley.config import Config, load_config

torch.set_num_threads(1)

TINY = (
    "data.transform.resize=8",
    "model.sizes=['resnet10','resnet14','resnet18']",
    "model.resnet.width=0.0625",
    "federation.clients=6",
    "federation.clients_per_round=4",
    "training.rounds=3",
    "training.epochs=1",
    "training.batch_size=32",
    "run.checkpoint_every=1",
)
"""Overrides that make the quickstart preset a run of a few seconds."""


def tiny_config(*overrides: str) -> Config:
    """Return a small digits federation of three sizes, with overrides on top."""
    return load_config(overrides=[*TINY, *overrides])


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the repository; tests that need them skip where there are none."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data sets are not at {folder}")
    return folder
