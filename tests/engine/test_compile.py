"""Compiled models (`engine.compile`) train and answer as plain ones do, up to rounding."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.kernels import ALL

COMPILER = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no C++ compiler ({COMPILER})"
)

#: Some 360 examples per client are one whole batch and a short one, and so are the 360 test images.
SETTINGS = (
    'model.sizes=["mlp1", "mlp2"]',
    "model.mlp.hidden=8",
    "federation.clients=4",
    "federation.clients_per_round=4",
    "training.epochs=1",
    "training.batch_size=256",
    "evaluation.batch_size=200",
)


def outcome(*overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state after a round, and the scores."""
    federation = Federation(load_config(overrides=[*SETTINGS, *overrides]))
    server, record = federation.run_round(federation.initial_state())
    return dict(server.state), record.scores


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_is_the_plain_run_up_to_rounding() -> None:
    torch._dynamo.reset()
    before = graphs()
    state, scores = outcome("engine.compile=true")
    assert graphs() - before == 4, (
        "each size once for training and once for evaluation: short batches run plainly"
    )
    plain, plain_scores = outcome()
    assert graphs() - before == 4
    for name, tensor in plain.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    for size, score in plain_scores.items():
        assert scores[size].accuracy == pytest.approx(score.accuracy, abs=0.01)


def test_the_debug_engine_compiles_nothing() -> None:
    torch._dynamo.reset()
    before = graphs()
    outcome("engine.compile=true", "engine.name=debug")
    assert graphs() == before


def test_a_compiler_that_does_not_work_is_an_error_that_names_the_setting() -> None:
    import torch._inductor.config

    torch._dynamo.reset()
    missing = {"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(missing),
        pytest.raises(MotleyError, match=r"engine.compile = true: .*false"),
    ):
        outcome("engine.compile=true", "model.mlp.hidden=9")


def test_kernels_are_all_none_or_listed_and_compiled_models_have_none_for_layers() -> None:
    def names(*overrides: str) -> set[str]:
        return set(load_config(overrides=overrides).engine.kernel_names)

    assert names() == names("engine.kernels=true") == set(ALL)
    assert names("engine.kernels=false") == set()
    assert names("engine.kernels=[norm]") == {"norm"}
    assert names("engine.compile=true") == {"augment", "optimizer"}
    with pytest.raises(
        MotleyError,
        match=r"engine\.kernels.*'x': should be 'augment', 'conv', 'norm', 'optimizer', 'pool' or 'stem'",
    ):
        load_config(overrides=["engine.kernels=[x]"])
