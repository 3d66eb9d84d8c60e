"""The benchmark of convolutions on large maps: a dry run, its kernels, and its bookkeeping.

The kernels run in Triton's interpreter: `make test-kernels`.
"""

from __future__ import annotations

import functools
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import large_maps
from benchmarks.large_maps import Candidate, Tile
from motley.kernels import AVAILABLE

INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from benchmarks import flat_convolve


def dry_run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> dict[str, Any]:
    flags = ["--output", str(output), "--device", "cpu", *arguments]
    monkeypatch.setattr("sys.argv", ["large_maps", *flags])
    large_maps.main()
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def test_a_dry_run_measures_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = dry_run(monkeypatch, tmp_path / "maps.json")
    assert len(content["shapes"]) == 2
    for shape in content["shapes"]:
        assert set(shape["passes"]) == {"y", "dx", "dw"}
        for result in shape["passes"].values():
            assert result["ms"]["cudnn"]["beside"] > 0 and not result["errors"]
    alone = content["network"]["alone"]
    assert alone["cuDNN"]["missing"] == alone["best of each"]["missing"] == 0
    assert 0 < alone["best of each"]["ms"] <= alone["cuDNN"]["ms"]
    missing = 0 if INTERPRETED else 6
    for label in ("best of ours", "best of position", "best of flat"):
        assert alone[label]["missing"] == missing
    assert INTERPRETED or "all kernels" in content["left_out"]


def test_the_results_are_whole_when_time_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = dry_run(monkeypatch, tmp_path / "maps.json", "--seconds", "0")
    for shape in content["shapes"]:
        assert {result["error"] for result in shape["passes"].values()} == {
            "not measured: out of time"
        }
    assert content["network"]["beside"]["best of each"] == {"ms": 0, "missing": 6}


def test_the_shapes_are_those_of_the_network() -> None:
    shapes = large_maps.network_shapes()
    assert len(shapes) == 10 and sum(shape.count for shape in shapes) == 19
    # The page of benchmarks says 427 GFLOP per step, with 0.9 for the first convolution.
    gflop = sum(3 * shape.count * shape.flop(128) for shape in shapes) / 1e9
    assert gflop == pytest.approx(425.2, abs=0.1)


def test_kernels_that_fail_or_are_wrong_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kernel(problem: large_maps.Problem, candidate: Candidate) -> None:
        if candidate.tile.stages == 2:
            raise RuntimeError("out of resource: shared memory\nhint")
        exact = problem.by_torch(candidate.name)
        problem.results[candidate.name].copy_(exact * (2 if candidate.tile.stages == 3 else 1))

    monkeypatch.setattr(large_maps.Problem, "by_kernel", by_kernel)
    shape = large_maps.Shape(32, 32, 4, 1, 3)
    problems = [large_maps.Problem(shape, 2, torch.device("cpu"))]
    candidates = [Candidate("flat", "dx", Tile(64, 32, 32, 4, stages)) for stages in (2, 3, 4)]
    end = float("inf")
    ours, errors = large_maps.measure_kernels(problems, "dx", candidates, end)
    assert list(ours) == ["flat dx 64x32x32 w4 s4"] and "beside" in ours["flat dx 64x32x32 w4 s4"]
    assert errors == {
        "flat dx 64x32x32 w4 s2": "RuntimeError: out of resource: shared memory",
        "flat dx 64x32x32 w4 s3": "ArithmeticError: relative error 1.0e+00",
    }
    compiled = large_maps.compile_all(candidates, problems[0], end)
    assert [isinstance(result, str) for result in compiled.values()] == [True, False, False]


class Fake:
    """Stands for a stream, a graph or an event of CUDA, and counts how often it is replayed."""

    def __init__(self, **_: Any) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def elapsed_time(self, end: Fake) -> float:
        return 80.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_the_time_per_call_on_a_gpu_is_of_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the code for a GPU without one."""
    calls: list[int] = []
    for name in ("Stream", "CUDAGraph", "Event"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(large_maps, "capture", lambda graph, stream: nullcontext())
    functions = [functools.partial(calls.append, number) for number in range(4)]
    ms = large_maps.milliseconds(functions, torch.device("cuda"))
    assert ms == 80 / (4 * large_maps.CALLS)
    # Once eagerly, then in the graph.
    assert [calls.count(number) for number in range(4)] == [1 + large_maps.CALLS] * 4


def test_tiles_that_cannot_run_say_why() -> None:
    assert Tile(128, 128, 64, 8, 4).obstacle("y") is None
    assert Tile(256, 256, 64, 8, 2).obstacle("y") is not None  # registers
    assert Tile(64, 256, 64, 4, 5).obstacle("dx") is None
    assert Candidate("position", "y", Tile(256, 64, 64, 8, 3)).obstacle(128) is not None
    assert Candidate("flat", "y", Tile(256, 64, 64, 8, 3)).obstacle(128) is None
    assert Tile(128, 256, 128, 8, 3).obstacle("dx") == "needs 288 KB of shared memory"


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "shape",
    [
        # images, inputs, outputs, height, width, taps, stride, padding
        (3, 32, 64, 5, 7, 3, 1, 1),
        (2, 64, 32, 8, 8, 3, 2, 1),
        (2, 32, 32, 7, 5, 3, 2, 1),
        (5, 32, 32, 6, 6, 1, 2, 0),
        (2, 32, 32, 7, 7, 5, 3, 2),
        (1, 32, 32, 4, 4, 3, 1, 0),
    ],
)
def test_kernels_over_flattened_positions_equal_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    count, inputs, outputs, height, width, taps, stride, padding = shape
    last = {"memory_format": torch.channels_last}
    x = torch.randn(count, inputs, height, width).to(**last)  # type: ignore[call-overload]
    weight = torch.randn(outputs, inputs, taps, taps).to(**last)  # type: ignore[call-overload]
    wanted = F.conv2d(x, weight, stride=stride, padding=padding)
    dy = torch.randn(wanted.shape).to(**last)  # type: ignore[call-overload]
    y, dx, dweight = (torch.full_like(t, torch.nan) for t in (dy, x, weight))
    tile = Tile(16, 32, 32, 4, 2).options()
    flat_convolve.run(x, weight, y, stride, padding, tile, backward=False)
    flat_convolve.run(dy, weight, dx, stride, padding, tile, backward=True)
    flat_convolve.weight_gradient(x, dy, dweight, stride, padding, tile)
    wanted_dx, wanted_dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, False]
    )  # fmt: skip
    for mine, theirs in ((y, wanted), (dx, wanted_dx), (dweight, wanted_dweight)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
