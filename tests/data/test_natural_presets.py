"""The presets of the natural data sets, for a round or two on small files in the real formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from motley.config import parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.data.dataset import load_dataset
from motley.federation import Federation
from tests.data.natural_files import (
    write_har_arrays,
    write_heart,
    write_texts,
    write_writers,
)

#: Preset -> what writes its data, and what makes the run small.
SMALL: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "har": (write_har_arrays, ["federation.clients=3", "model.cnn1d.width=4"]),
    "mnist-writers": (
        write_writers,
        ["federation.clients=4", "model.resnet.width=0.0625", "data.transform.resize=14"],
    ),
    "heart": (write_heart, ["model.table.hidden=4"]),
    "shakespeare-lstm": (
        write_texts,
        ["federation.clients=3", "model.lstm.hidden=8", "data.max_per_client=20"],
    ),
    "shakespeare-transformer": (
        write_texts,
        ["federation.clients=3", "model.decoder.dim=8", "data.max_per_client=20"],
    ),
}


@pytest.mark.parametrize("preset", SMALL)
def test_a_preset_runs_with_inco(tmp_path: Path, preset: str) -> None:
    write, small = SMALL[preset]
    write(tmp_path)
    overrides = [
        *small,
        f"data.root={tmp_path}",
        "federation.clients_per_round=2",
        "training.rounds=1",
        "training.batch_size=16",
        "server.inco.variant=paper",
    ]
    federation = Federation(resolve(preset, [parse_overrides(overrides)]))
    _, record = federation.run_round(federation.initial_state())
    assert not record.refused
    assert np.isfinite(record.train_loss)
    assert len(record.scores) == 3
    train = federation.dataset.train
    assert train.clients is not None
    for client in range(len(federation.partition)):
        assert len(np.unique(train.clients[federation.partition.of(client)])) == 1


#: Data set -> natural clients and examples for training, and those for testing.
REAL = {
    "har": (30, 7_870, 30, 2_429),
    "mnist-writers": (539, 60_000, 297, 10_000),
    "heart": (4, 486, 4, 254),
    "shakespeare": (799, 3_335_126, 799, 771_050),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_real_files_have_their_known_counts(name: str) -> None:
    if "MOTLEY_DATA" not in os.environ:
        pytest.skip("MOTLEY_DATA does not name a folder with the real data sets")
    try:
        data = load_dataset(name)
    except MotleyError as error:
        pytest.skip(f"MOTLEY_DATA has no {name}: {error}")
    counts = []
    for part in (data.train, data.test):
        counts += [len(np.unique(part.clients)), len(part)]
    assert tuple(counts) == REAL[name]
