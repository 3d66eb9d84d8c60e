"""The search for the tiles of kernels finds the best values, whatever fails on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.tiles import Constant, Measurement, search
from motley.engine.slots import Slot
from motley.federation import Federation
from motley.server.exchange import make_job
from tests.conftest import tiny_config


def two_constants() -> tuple[dict[str, int], SimpleNamespace, list[Constant]]:
    table, module = {"IMAGES": 64}, SimpleNamespace(WARPS=4)
    constants = [
        Constant("images", table, "IMAGES", (32, 64, 128)),
        Constant("warps", module, "WARPS", (2, 4, 8)),
    ]
    return table, module, constants


def run_search(
    constants: list[Constant], measure: Callable[[], float], seconds: float = 60
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    entries: list[dict[str, Any]] = []
    best = search(constants, measure, time.perf_counter() + seconds, entries.append)
    return best, entries


def test_the_best_values_are_found_and_stay() -> None:
    table, module, constants = two_constants()

    def measure() -> float:
        # Eight warps are only better with small blocks, so it takes a second pass to see that.
        if module.WARPS == 2:
            raise RuntimeError("out of resources\nmore")
        return table["IMAGES"] / 32 + (1 if module.WARPS == 4 else 0.5)

    best, entries = run_search(constants, measure)
    assert best == {"images": 32, "warps": 8}
    assert (table["IMAGES"], module.WARPS) == (32, 8)
    assert [entry["error"] for entry in entries if "error" in entry] == [
        "RuntimeError: out of resources"
    ] * 2
    assert entries[0] == {"changed": "nothing", "values": {"images": 64, "warps": 4}, "ms": 3.0}


def test_noise_is_no_gain() -> None:
    table, _, constants = two_constants()
    best, _ = run_search(constants, lambda: 10 - 0.01 * (table["IMAGES"] == 128))
    assert best == {"images": 64, "warps": 4}


def test_no_measurement_begins_after_the_time() -> None:
    _, _, constants = two_constants()
    best, entries = run_search(constants, lambda: 1.0, seconds=-1)
    assert best == {"images": 64, "warps": 4}
    assert [entry["changed"] for entry in entries] == ["nothing"]


def test_values_that_cannot_be_measured_at_all_are_an_error() -> None:
    _, _, constants = two_constants()

    def measure() -> float:
        raise RuntimeError("no GPU")

    with pytest.raises(SystemExit, match="cannot be measured"):
        run_search(constants, measure)


def test_a_loss_that_changes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    federation = Federation(tiny_config("model.sizes=['resnet10']", "engine.workers=1"))
    slot = Slot(federation.engine.clients, "resnet10")  # type: ignore[union-attr]
    job = make_job(federation.context, federation.initial_state(), 1, 0)
    slot.load(job, slot.clients.plan(job))
    measurement = Measurement(federation, ["resnet10"])
    for _ in range(2):  # the same steps from the beginning
        measurement._check_loss(slot, "resnet10")
    measurement.first_losses["resnet10"] *= 1.1
    with pytest.raises(ValueError, match="the loss of resnet10 is"):
        measurement._check_loss(slot, "resnet10")
