"""What the first round after a cold start spends its time on.

    python benchmarks/first_round.py --output first_round.json [--set KEY=VALUE] [--keep-cache]

Plays two rounds of the setting of `benchmarks/rounds.py` in one process, with an empty cache of
compiled kernels, and prints the seconds of each step: importing torch and Motley, building the
federation, the first round and the second one. Python's profiler then says which functions the first round's
seconds are in. It makes Python slower, so the first round is also timed without it, in a process of its own.
A process that fails or takes longer than `--seconds` is written down with its error.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: How many functions are listed.
NUM_FUNCTIONS = 60


def measure(overrides: list[str], preset: str, profiled: bool) -> dict[str, Any]:
    """Run in this process, which should be a new one, and return seconds and functions."""
    begin = time.perf_counter()
    seconds: dict[str, float] = {}

    def lap(step: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[step], begin = now - begin, now
        print(f"  {step:24}{seconds[step]:8.2f} s", file=sys.stderr, flush=True)

    import torch

    from benchmarks.rounds import SETTING
    from motley.bench import synthetic_dataset
    from motley.config import load_config
    from motley.engine.device import request_hardware_queues
    from motley.federation import Federation

    lap("import")
    request_hardware_queues()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").item()
    lap("device")
    dataset = synthetic_dataset("cifar10")
    config = load_config(None, preset=preset, overrides=[*SETTING, *overrides])
    lap("data and configuration")
    federation = Federation(config, dataset=dataset)
    server = federation.initial_state()
    lap("federation")
    profiler = cProfile.Profile()
    if profiled:
        profiler.enable()
    server, record = federation.queue_round(server)
    record.read()
    profiler.disable()
    lap("first round")
    _, record = federation.queue_round(server)
    record.read()
    lap("second round")
    return {"seconds": seconds, "functions": functions_of(profiler) if profiled else []}


def functions_of(profiler: cProfile.Profile) -> list[dict[str, Any]]:
    """Return the functions that the most seconds were spent in, calls of others not included."""
    profiler.create_stats()
    rows = []
    for (file, line, name), entry in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        calls, own_seconds, all_seconds = entry[1], entry[2], entry[3]
        where = f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"
        rows.append({"function": where, "calls": calls, "own": own_seconds, "all": all_seconds})
    rows.sort(key=lambda row: float(row["own"]), reverse=True)
    return rows[:NUM_FUNCTIONS]


def main() -> None:
    """Measure twice, with and without the profiler, each time in a process with empty caches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--preset", default="inco-cifar10")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--keep-cache", action="store_true", help="use the caches of compiled code")
    parser.add_argument("--seconds", type=float, default=540, help="for both processes together")
    parser.add_argument("--child", choices=("plain", "profiled"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measure(chosen.set, chosen.preset, chosen.child == "profiled")))
        return
    results: dict[str, dict[str, Any]] = {}
    end = time.perf_counter() + chosen.seconds
    for child in ("plain", "profiled"):
        print(child, flush=True)
        try:
            results[child] = run_child(child, chosen.keep_cache, end - time.perf_counter())
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            results[child] = {"error": f"{type(error).__name__}: {error}"}
            print(f"  {results[child]['error']}", flush=True)
        if chosen.output:
            chosen.output.write_text(json.dumps(results, indent=1))
    for row in results["profiled"].get("functions", []):
        print(f"{row['own']:8.2f} {row['all']:8.2f} {row['calls']:8}  {row['function']}")


def run_child(child: str, keep_cache: bool, seconds: float) -> dict[str, Any]:
    """Measure in a new process, with this one's arguments, and return its results."""
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ)
        if not keep_cache:
            environment["TRITON_CACHE_DIR"] = f"{cache}/triton"
            environment["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/inductor"
        command = [sys.executable, "-m", "benchmarks.first_round", *sys.argv[1:], "--child", child]
        output = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=max(seconds, 0.0),
        ).stdout
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    return results


if __name__ == "__main__":
    main()
