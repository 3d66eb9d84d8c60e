"""Convolutions of FedImpro's ResNet-18 (32x32 maps, batch 128, fp16): cuDNN against Motley's kernels with many tiles.

    python -m benchmarks.large_maps --output large-maps.json --seconds 540
    TRITON_INTERPRET=1 python -m benchmarks.large_maps --output dry-run.json --device cpu

For every shape of the network, and for y, dx and dw, this measures the milliseconds of

- cudnn, and cudnn-benchmark: torch's convolution, without and with `torch.backends.cudnn.benchmark`;
- position: `motley.kernels.convolve`, a program per output position and block of images;
- flat: `benchmarks/flat_convolve.py`, a program per block of output positions.

Times are medians of replayed CUDA graphs of several calls, so that the host's launches do not count: alone, and with four
streams side by side (total time divided by all calls; the tiles that are fastest alone are tried). Every tile is compared
with torch's convolution in fp32, and none that is wrong counts. A tile's name is IMAGES x OUTPUTS x INPUTS, warps, stages.
Kernels do not depend on the shape, so all tiles are compiled first, on all cores. The first convolution of the network is
left out: it has a kernel of its own (`motley.kernels.stem`).

On a CPU, two tiny shapes and one tile show whether the script runs. Its times mean nothing there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.config import load_config
from motley.core.graphs import capture
from motley.engine.device import numerics, request_hardware_queues
from motley.engine.workers import available_cores
from motley.kernels import AVAILABLE
from motley.models import MODELS, ImageShape
from motley.runs.folder import describe_environment

if AVAILABLE:
    from benchmarks import flat_convolve
    from motley.kernels import convolve

PRESET = "fedimpro-cifar10"
PASSES = ("y", "dx", "dw")
KINDS = ("flat", "position")
TORCHS = ("cudnn", "cudnn-benchmark")
STREAMS = 4
#: Calls per captured graph, and replays of it that are timed.
CALLS, REPLAYS = 20, 7
#: How many of the tiles that are fastest alone are also measured side by side.
FASTEST = 5
#: The largest relative error in fp16. Rounding the result makes 2e-4.
LIMIT = 2e-3
#: Share of the time in which kernels may be compiled.
COMPILING = 0.45
#: Bytes of shared memory that a program can have on an H200.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Shape:
    """A convolution of square maps."""

    inputs: int
    outputs: int
    side: int
    stride: int
    taps: int
    #: How often the network has it.
    count: int = 1

    @property
    def padding(self) -> int:
        return self.taps // 2

    @property
    def out_side(self) -> int:
        return (self.side + 2 * self.padding - self.taps) // self.stride + 1

    def flop(self, batch: int) -> int:
        """Return the operations of each of the three passes."""
        return 2 * batch * self.inputs * self.outputs * (self.out_side * self.taps) ** 2

    def __str__(self) -> str:
        sides = f"{self.side}x{self.side}"
        return f"{self.inputs}->{self.outputs} {sides} {self.taps}x{self.taps} /{self.stride}"


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work."""

    images: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.images}x{self.outputs}x{self.inputs} w{self.warps} s{self.stages}"

    def options(self) -> dict[str, int]:
        """Return it as the kernels take it."""
        return {
            "IMAGES": self.images,
            "OUTPUTS": self.outputs,
            "INPUTS": self.inputs,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def obstacle(self, name: str) -> str | None:
        """Return why a kernel with this tile need not be tried, or None."""
        if name == "dw":
            results, loaded = self.outputs * self.inputs, self.images * (self.outputs + self.inputs)
        else:
            results, loaded = self.images * self.outputs, self.inputs * (self.images + self.outputs)
        if 2 * loaded * self.stages > SHARED_MEMORY:
            return f"needs {2 * loaded * self.stages // 1024} KB of shared memory"
        if results // (32 * self.warps) > 128:
            return "a thread would need more than 128 registers for results"
        if self.warps > 4 and results // (32 * self.warps) < 32:
            return "too small for so many warps"
        return None


@dataclass(frozen=True)
class Candidate:
    """A kernel with a tile."""

    kind: str
    name: str
    tile: Tile

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.tile}"

    def fits(self, shape: Shape) -> bool:
        """Tell whether the tile divides a shape's channels."""
        read, written = shape.inputs, shape.outputs
        if self.name == "dx":
            read, written = written, read
        return read % self.tile.inputs == 0 and written % self.tile.outputs == 0

    def obstacle(self, batch: int) -> str | None:
        """Return why the kernel need not be tried, or None."""
        if self.kind == "position" and self.tile.images > batch:
            return "more images than a batch has"
        return self.tile.obstacle(self.name)


class Problem:
    """The tensors of a convolution."""

    def __init__(self, shape: Shape, batch: int, device: torch.device) -> None:
        self.shape = shape
        torch.manual_seed(0)

        def drawn(*sizes: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(sizes, device=device) * scale
            return values.to(torch.float16).to(memory_format=torch.channels_last)

        side, out_side = shape.side, shape.out_side
        fan_in = shape.inputs * shape.taps**2
        self.x = drawn(batch, shape.inputs, side, side)
        self.weight = drawn(shape.outputs, shape.inputs, shape.taps, shape.taps, scale=fan_in**-0.5)
        self.dy = drawn(batch, shape.outputs, out_side, out_side)
        self.results = {
            "y": torch.empty_like(self.dy),
            "dx": torch.empty_like(self.x),
            "dw": torch.empty_like(self.weight),
        }

    def by_torch(self, name: str, dtype: torch.dtype = torch.float16) -> Tensor:
        """Compute a pass with torch."""
        x, weight, dy = (tensor.to(dtype) for tensor in (self.x, self.weight, self.dy))
        strides, paddings = [self.shape.stride] * 2, [self.shape.padding] * 2
        if name == "y":
            return F.conv2d(x, weight, None, strides, paddings)
        wanted = [name == "dx", name == "dw", False]
        gradients = torch.ops.aten.convolution_backward(
            dy, x, weight, None, strides, paddings, [1, 1], False, [0, 0], 1, wanted
        )
        gradient: Tensor = gradients[0 if name == "dx" else 1]
        return gradient

    def by_kernel(self, candidate: Candidate) -> None:
        """Compute a pass with a kernel, into `results`."""
        module = flat_convolve if candidate.kind == "flat" else convolve
        name, options = candidate.name, candidate.tile.options()
        result, stride, padding = self.results[name], self.shape.stride, self.shape.padding
        if name == "y":
            module.run(self.x, self.weight, result, stride, padding, options, backward=False)
        elif name == "dx":
            module.run(self.dy, self.weight, result, stride, padding, options, backward=True)
        else:
            module.weight_gradient(self.x, self.dy, result, stride, padding, options)

    def exact(self, name: str) -> Tensor:
        """Compute a pass with torch in single precision."""
        with numerics("fp32", torch.get_num_threads()):
            return self.by_torch(name, torch.float32)

    def error(self, candidate: Candidate, exact: Tensor) -> float:
        """Return the relative error of a kernel."""
        result = self.results[candidate.name].fill_(torch.nan)
        self.by_kernel(candidate)
        return float((result.float() - exact).norm() / exact.norm())


def network_shapes() -> list[Shape]:
    """Return the convolutions of the preset's network, except for the first one."""
    config = load_config(None, preset=PRESET)
    with torch.device("meta"):
        model = MODELS["resnet18"].make(config.model.resnet, ImageShape(3, 32, 32), 10)
    counts: Counter[Shape] = Counter()

    def note(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d) and layer.padding[0] == layer.kernel_size[0] // 2
        side, taps = args[0].shape[2], layer.kernel_size[0]
        counts[Shape(layer.in_channels, layer.out_channels, side, layer.stride[0], taps)] += 1

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(note)
    model(torch.empty(2, 3, 32, 32, device="meta"))
    return [
        Shape(**{**asdict(shape), "count": count})
        for shape, count in counts.items()
        if shape.inputs > 3
    ]


def all_candidates(tiny: bool, batch: int) -> tuple[list[Candidate], dict[str, str]]:
    """Return the kernels to try, the most promising first, and why others are left out."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not AVAILABLE or (tiny and not interpreted):
        return [], {"all kernels": "they need Triton, and a GPU or TRITON_INTERPRET=1"}
    candidates = []
    left_out = {}
    for tile in sorted(tiny_tiles() if tiny else tiles(), key=promise):
        for kind in KINDS:
            for name in PASSES:
                candidate = Candidate(kind, name, tile)
                obstacle = candidate.obstacle(batch)
                if obstacle is None:
                    candidates.append(candidate)
                else:
                    left_out[str(candidate)] = obstacle
    return candidates, left_out


def tiles() -> Iterator[Tile]:
    """Return all tiles."""
    sides = (64, 128, 256)
    yield Tile(64, 64, 32, 4, 4)  # that of `convolve.GRADIENT_TILES`
    for images in sides:
        for outputs in sides:
            for inputs in sides:
                for warps in (4, 8):
                    for stages in (2, 3, 4, 5):
                        yield Tile(images, outputs, inputs, warps, stages)


def tiny_tiles() -> Iterator[Tile]:
    """Return a tile for a dry run."""
    yield Tile(16, 32, 32, 4, 2)


def promise(tile: Tile) -> tuple[int, int]:
    """Return a key for sorting: usual tiles first, in case that the time is too short for all."""
    return max(tile.images, tile.outputs, tile.inputs), abs(2 * tile.stages - 7)


def compile_all(candidates: Sequence[Candidate], problem: Problem, end: float) -> dict[str, Any]:
    """Run every kernel once, on all cores, and return the seconds or the error of each."""

    def run(candidate: Candidate) -> float:
        if time.perf_counter() > end:
            raise TimeoutError("not compiled: out of time")
        begin = time.perf_counter()
        problem.by_kernel(candidate)
        return time.perf_counter() - begin

    compiled: dict[str, Any] = {}
    with ThreadPoolExecutor(available_cores()) as pool:
        futures: list[tuple[Candidate, Future[float]]] = [
            (candidate, pool.submit(run, candidate)) for candidate in candidates
        ]
        for candidate, future in futures:
            try:
                compiled[str(candidate)] = round(future.result(), 2)
            except Exception as error:
                compiled[str(candidate)] = describe(error)
            if len(compiled) % 100 == 0:
                print(f"  {len(compiled)} of {len(candidates)}", flush=True)
    synchronize(problem.x.device)
    return compiled


def describe(error: Exception) -> str:
    """Return an error's type and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the time per call of functions that run side by side, each on its own stream."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for call in calls:
            call()
        return 1000 * (time.perf_counter() - begin) / len(calls)
    graphs = []
    for call in calls:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # libraries choose their algorithms
        torch.cuda.synchronize()
        with capture(graph, stream):
            for _ in range(CALLS):
                call()
        graphs.append((graph, stream))
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPLAYS + 1):
        torch.cuda.synchronize()
        begin_event.record()
        for graph, stream in graphs:
            stream.wait_event(begin_event)
            with torch.cuda.stream(stream):
                graph.replay()
        for _, stream in graphs:
            torch.cuda.current_stream().wait_stream(stream)
        end_event.record()
        torch.cuda.synchronize()
        times.append(begin_event.elapsed_time(end_event))
    return statistics.median(times[1:]) / (CALLS * len(calls))


@contextmanager
def cudnn_benchmark(wanted: bool) -> Iterator[None]:
    """Let cuDNN try its algorithms inside the block, or not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def measure_torch(problems: Sequence[Problem], name: str) -> dict[str, dict[str, float]]:
    """Return the milliseconds of torch's convolution, alone and side by side."""
    device = problems[0].x.device
    result: dict[str, dict[str, float]] = {}
    for variant in TORCHS:
        with cudnn_benchmark(variant == "cudnn-benchmark"):
            calls = [functools.partial(problem.by_torch, name) for problem in problems]
            alone, beside = milliseconds(calls[:1], device), milliseconds(calls, device)
        result[variant] = {"alone": alone, "beside": beside}
    return result


def measure_kernels(
    problems: Sequence[Problem], name: str, candidates: Sequence[Candidate], end: float
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the milliseconds of kernels, and the errors of those that are wrong or fail."""
    device = problems[0].x.device
    exact = problems[0].exact(name)
    results: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    by_name = {str(candidate): candidate for candidate in candidates}
    for label, candidate in by_name.items():
        if time.perf_counter() > end:
            errors[label] = "not measured: out of time"
            continue
        try:
            error = problems[0].error(candidate, exact)
            if not error <= LIMIT:  # NaN is wrong, too
                raise ArithmeticError(f"relative error {error:.1e}")
            call = functools.partial(problems[0].by_kernel, candidate)
            results[label] = {"alone": milliseconds([call], device), "error": error}
        except Exception as error:
            errors[label] = describe(error)
    fastest = sorted(results, key=lambda label: results[label]["alone"])[:FASTEST]
    for label in fastest:
        calls = [functools.partial(problem.by_kernel, by_name[label]) for problem in problems]
        try:
            results[label]["beside"] = milliseconds(calls, device)
        except Exception as error:
            errors[label] = describe(error)
    return results, errors


def fastest_of(
    times: dict[str, dict[str, float]], kinds: Sequence[str], setting: str
) -> tuple[str, float] | None:
    """Return name and milliseconds of the fastest of some kinds, alone or side by side."""
    found = [
        (entry[setting], label)
        for label, entry in times.items()
        if setting in entry and label.split()[0] in kinds
    ]
    return None if not found else (min(found)[1], min(found)[0])


#: What is added up over the network.
SUMS = {
    "cuDNN": TORCHS[:1],
    "cuDNN with benchmark": TORCHS[1:],
    "best of ours": KINDS,
    "best of position": ("position",),
    "best of flat": ("flat",),
    "best of each": (*TORCHS, *KINDS),
}


def network_sums(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of all convolutions of the network, and how many are not included."""
    sums: dict[str, Any] = {}
    for setting in ("alone", "beside"):
        for label, kinds in SUMS.items():
            total, missing = 0.0, 0
            for entry in shapes:
                for name in PASSES:
                    times = entry["passes"].get(name, {}).get("ms", {})
                    fastest = fastest_of(times, kinds, setting)
                    if fastest is None:
                        missing += entry["count"]
                    else:
                        total += entry["count"] * fastest[1]
            sums.setdefault(setting, {})[label] = {"ms": round(total, 4), "missing": missing}
    return sums


def measure_pass(
    problems: Sequence[Problem], name: str, candidates: Sequence[Candidate], end: float
) -> dict[str, Any]:
    """Measure a pass of a shape, and print a line."""
    shape, batch = problems[0].shape, len(problems[0].x)
    try:
        times = measure_torch(problems, name)
        ours, errors = measure_kernels(problems, name, candidates, end)
    except Exception as error:
        print(f"{shape!s:26} {name:2}  {describe(error)}", flush=True)
        return {"error": describe(error)}
    times.update(ours)
    best: dict[str, Any] = {}
    words = [f"cuDNN {times['cudnn']['alone']:.4f} ms, {times['cudnn']['beside']:.4f} beside"]
    for kind in KINDS:
        for setting in ("alone", "beside"):
            fastest = fastest_of(times, (kind,), setting)
            if fastest is None:
                continue
            label, ms = fastest
            tflops = shape.flop(batch) / ms / 1e9
            best[f"{kind} {setting}"] = {"tile": label, "ms": ms, "tflops": tflops}
            tile = " ".join(label.split()[2:])
            words.append(f"{kind} {setting} {ms:.4f} ms {tflops:.0f} TFLOP/s ({tile})")
    print(f"{shape!s:26} {name:2}  " + ";  ".join(words), flush=True)
    tflops = {
        label: {key: shape.flop(batch) / ms / 1e9 for key, ms in entry.items() if key != "error"}
        for label, entry in times.items()
    }
    return {"best": best, "ms": times, "tflops": tflops, "errors": errors}


def main() -> None:
    """Measure all shapes, and write the results after each pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--seconds", type=float, default=540, help="stop after about this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    request_hardware_queues()
    device, tiny = torch.device(arguments.device), arguments.device == "cpu"
    batch = 16 if tiny else 128
    shapes = [Shape(32, 32, 3, 2, 3), Shape(64, 32, 2, 1, 1)] if tiny else network_shapes()
    candidates, left_out = all_candidates(tiny, batch)
    content: dict[str, Any] = {
        "environment": describe_environment(), "batch": batch, "left_out": left_out, "shapes": [],
    }  # fmt: skip

    def save() -> None:
        content["network"] = network_sums(content["shapes"])
        arguments.output.write_text(json.dumps(content, indent=1))

    save()
    print(f"compiling {len(candidates)} kernels", flush=True)
    # All tiles fit a shape with as many channels as the largest ones.
    widest = max(shapes, key=lambda shape: (min(shape.inputs, shape.outputs), shape.inputs))
    end = begin + COMPILING * arguments.seconds
    # The interpreter compiles nothing, and is no good in several threads.
    compiled = {} if tiny else compile_all(candidates, Problem(widest, batch, device), end)
    content["compiled"] = compiled
    candidates = [c for c in candidates if not isinstance(compiled.get(str(c)), str)]
    print(f"{len(candidates)} compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    todo = [(shape, name) for shape in shapes for name in PASSES]
    for number, (shape, name) in enumerate(todo):
        now = time.perf_counter()
        remaining = begin + arguments.seconds - now
        if name == PASSES[0]:
            problems = [Problem(shape, batch, device) for _ in range(2 if tiny else STREAMS)]
            entry: dict[str, Any] = {**asdict(shape), "gflop": shape.flop(batch) / 1e9}
            content["shapes"].append({**entry, "passes": {}})
        if remaining <= 0:
            result: dict[str, Any] = {"error": "not measured: out of time"}
        else:
            fitting = [c for c in candidates if c.name == name and c.fits(shape)]
            end = now + remaining / (len(todo) - number)
            result = measure_pass(problems, name, fitting, end)
        content["shapes"][-1]["passes"][name] = result
        save()
    for setting, sums in content["network"].items():
        for label, entry in sums.items():
            missing = f" ({entry['missing']} passes missing)" if entry["missing"] else ""
            print(f"network, {setting:6} {label:22}{entry['ms']:9.3f} ms{missing}", flush=True)


if __name__ == "__main__":
    main()
