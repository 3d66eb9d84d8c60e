"""A federation's precision and threads apply while it computes, and change nothing else in the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from motley.engine.device import numerics
from motley.federation import Federation
from tests.conftest import tiny_config

Flags = tuple[bool, bool, int]


def flags() -> Flags:
    """Return the process's settings that a federation has an opinion about."""
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_num_threads(),
    )


@pytest.fixture(params=[(False, True, 1), (True, False, 2)], ids=str)
def own_flags(request: pytest.FixtureRequest) -> Iterator[Flags]:
    """Give the process settings of its own for a test."""
    before = flags()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, threads = request.param
    torch.set_num_threads(threads)
    yield flags()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, threads = before
    torch.set_num_threads(threads)


def test_two_federations_change_neither_each_other_nor_the_process(own_flags: Flags) -> None:
    brief = ("model.sizes=['mlp1']", "training.steps=1", "federation.clients_per_round=1")
    one = Federation(tiny_config(*brief, "engine.precision=fp32", "engine.threads=1"))
    two = Federation(tiny_config(*brief, "engine.precision=tf32", "engine.threads=2"))
    assert flags() == own_flags
    seen: dict[str, list[Flags]] = {"one": [], "two": []}
    states = {"one": one.initial_state(), "two": two.initial_state()}
    for _ in range(2):
        for name, federation in (("one", one), ("two", two)):
            states[name], _ = federation.run_round(
                states[name], lambda client, name=name: seen[name].append(flags())
            )  # type: ignore[misc]
            assert flags() == own_flags
    assert seen == {"one": [(False, False, 1)] * 2, "two": [(True, True, 2)] * 2}
    one.evaluate(states["one"].state)
    assert flags() == own_flags


def test_the_process_gets_its_flags_back_after_a_failure(own_flags: Flags) -> None:
    with pytest.raises(ValueError, match="on purpose"), numerics("fp32", 3):
        raise ValueError("on purpose")
    assert flags() == own_flags


def test_importing_motley_leaves_the_environment_alone() -> None:
    code = (
        "import os; before = dict(os.environ); import motley.federation, motley.client; "
        "assert dict(os.environ) == before"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
