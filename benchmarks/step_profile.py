"""Where the time of captured training steps goes on a GPU: alone, beside others, and kernel by kernel.

    python benchmarks/step_profile.py --output step-profile.json
    python benchmarks/step_profile.py --output step-profile.json --precision tf32 --sizes resnet26

The setting is that of `docs/benchmarks.md` (100 clients of five ResNets, batch 64, Adam, random images of CIFAR-10's
shape). For every size, one slot's captured step is replayed alone, then beside 1, 3, 7 and 9 slots of the same size, each
on its own stream. The kernels of one step come from torch's profiler. The control is a graph of as many kernels that do
nothing, on as many streams: how fast the GPU can start kernels at all. A size that fails is written down with its error.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from motley.bench import synthetic_dataset
from motley.config import load_config
from motley.core.graphs import capture
from motley.engine.device import numerics, request_hardware_queues
from motley.engine.slots import CHUNK, Slot
from motley.federation import Federation
from motley.runs.folder import describe_environment
from motley.server.exchange import make_job

SETTING = ("engine.slots=10", "model.resnet.trim_dead_taps=true", "evaluation.batch_size=5000")
TOGETHER = (1, 2, 4, 8, 10)


def make_slots(federation: Federation, size: str, count: int) -> list[Slot]:
    """Return slots of a size, each with a client loaded and its steps captured."""
    context, server = federation.context, federation.initial_state()
    clients = [
        client
        for client in range(federation.config.federation.clients)
        if context.algorithm.info.size_of(client, 1) == size
    ]
    slots = []
    for number in range(count):
        job = make_job(context, server, 1, clients[number % len(clients)])
        slot = Slot(federation.engine.clients, size)
        slot.load(job, slot.clients.plan(job))
        slots.append(slot)
    torch.cuda.synchronize()
    return slots


def milliseconds_per_step(slots: list[Slot], replays: int = 12, repeats: int = 5) -> float:
    """Return the time per step of slots that replay their longer graph at the same time."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for slot in slots:
            slot.stream.wait_event(begin)
        for _ in range(replays):
            for slot in slots:
                with torch.cuda.stream(slot.stream):
                    slot.learner.batches.rewind()
                    slot._graphs[0][CHUNK].replay()
        for slot in slots:
            torch.cuda.current_stream().wait_stream(slot.stream)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end))
    return statistics.median(seconds) / (replays * CHUNK * len(slots))


def kernels_of_a_step(slot: Slot) -> list[tuple[str, float, str, str]]:
    """Return name, microseconds, grid and block of every kernel of one step, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            with torch.cuda.stream(slot.stream):
                slot.learner.batches.rewind()
                slot._graphs[0][1].replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            shape = event.get("args", {})
            grid, block = str(shape.get("grid", "")), str(shape.get("block", ""))
            found.append((event["ts"], event["name"], event["dur"], grid, block))
    found.sort()
    per_step = len(found) // 3
    if not per_step:
        raise RuntimeError("torch's profiler saw no kernels")
    last = found[-per_step:]
    span = last[-1][0] + last[-1][2] - last[0][0]
    print(f"  {per_step} kernels, {sum(row[2] for row in last):.0f} us busy, {span:.0f} us in all")
    return [row[1:] for row in last]


def by_kind(kernels: list[tuple[str, float, str, str]]) -> list[dict[str, Any]]:
    """Group kernels by a shortened name."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, duration, _, _ in kernels:
        groups[re.sub(r"<.*", "", name)[:90]].append(duration)
    rows = [
        {"kernel": name, "count": len(durations), "us": round(sum(durations), 1)}
        for name, durations in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def empty_kernels(count: int, streams: int) -> float:
    """Return the microseconds per kernel of graphs of tiny kernels on several streams."""
    graphs = []
    for _ in range(streams):
        stream, tensor = torch.cuda.Stream(), torch.zeros(64, device="cuda")
        with torch.cuda.stream(stream):
            tensor.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capture(graph, stream):
            for _ in range(count):
                tensor.add_(1)
        graphs.append((graph, stream, tensor))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = 10
    for _ in range(2):
        torch.cuda.synchronize()
        begin.record()
        for _, stream, _ in graphs:
            stream.wait_event(begin)
        for _ in range(replays):
            for graph, stream, _ in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
        for _, stream, _ in graphs:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / (replays * count * streams)


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--preset", default="inco-cifar10")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=480, help="begin no size after this time")
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    request_hardware_queues()
    overrides = [*SETTING, f"engine.precision={arguments.precision}", *arguments.set]
    config = load_config(None, preset=arguments.preset, overrides=overrides)
    federation = Federation(config, dataset=synthetic_dataset("cifar10"))
    result: dict[str, Any] = {"environment": describe_environment(), "settings": overrides}
    result["empty_kernels_us"] = {n: round(empty_kernels(800, n), 3) for n in TOGETHER}
    print("us per empty kernel, by streams:", result["empty_kernels_us"], flush=True)
    sizes = arguments.sizes.split(",") if arguments.sizes else federation.config.model.sizes
    result["sizes"] = {}
    with numerics(arguments.precision, 1):
        for size in sizes:
            result["sizes"][size] = measured = {}
            try:
                if time.perf_counter() > end:
                    raise TimeoutError("out of time")
                profile_size(federation, size, measured)
            except Exception as error:
                traceback.print_exc()
                measured["error"] = f"{type(error).__name__}: {error}"
            arguments.output.write_text(json.dumps(result, indent=1))


def profile_size(federation: Federation, size: str, measured: dict[str, Any]) -> None:
    """Measure the steps of a size, and add what is found to `measured` at once."""
    slots = make_slots(federation, size, max(TOGETHER))
    milliseconds = {n: round(milliseconds_per_step(slots[:n]), 4) for n in TOGETHER}
    measured["ms_per_step"] = milliseconds
    print(f"{size}: ms per step beside others: {milliseconds}", flush=True)
    kernels = kernels_of_a_step(slots[0])
    kinds = by_kind(kernels)
    for row in kinds[:14]:
        print(f"    {row['us']:7.1f} us {row['count']:4} x {row['kernel']}", flush=True)
    measured.update({"kernels": len(kernels), "by_kind": kinds, "in_order": kernels})


if __name__ == "__main__":
    main()
