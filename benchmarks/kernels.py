"""What Motley's own kernels and torch.compile are worth: milliseconds per round, variant by variant, in one process.

The setting is that of `docs/benchmarks.md`: 100 clients of five ResNets, 10 per round, 5 epochs of batch 64, InCo,
evaluation of all sizes in every round, random images of CIFAR-10's shape. All variants sample the same clients with the
same data in the same rounds, so their rounds can be compared one by one.

    python benchmarks/kernels.py --output kernels.json
    python benchmarks/kernels.py --output kernels.json --variants compiled,kernels --precisions fp16
    python benchmarks/kernels.py --output kernels.json --smoke    # tiny models, for any machine

Results are written after every variant. A variant that fails is reported with its error, and the others go on. No
variant is started after `--budget` seconds.

plain              captured steps, torch's own layers and optimizer
compiled           the same with torch.compile
compiled+optimizer compiled, with Motley's optimizer kernel
kernels            all of Motley's kernels
kernels-NAME       all of them but one
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from motley.bench import measure, synthetic_dataset
from motley.config import load_config
from motley.data import Dataset
from motley.engine.device import request_hardware_queues
from motley.kernels import ALL
from motley.runs.folder import describe_environment

SETTING = ("engine.slots=10", "model.resnet.trim_dead_taps=true", "evaluation.batch_size=5000")
SMOKE = (
    'model.sizes=["resnet10","resnet14"]',
    "model.resnet.width=0.03125",
    "federation.clients=4",
    "federation.clients_per_round=2",
    "training.steps=2",
    "engine.device=cpu",
)
COMPARED = ("plain", "compiled", "compiled+optimizer", "kernels")


def variants() -> list[str]:
    """Return all variants, the most important first."""
    names = sorted(ALL, key=["norm", "conv", "optimizer", "augment", "stem", "pool"].index)
    return [*COMPARED, *(f"kernels-{name}" for name in names)]


def overrides(variant: str) -> list[str]:
    """Return the settings that make a variant."""
    if variant == "plain":
        return ["engine.kernels=false"]
    if variant == "compiled":
        return ["engine.compile=true", "engine.kernels=false"]
    if variant == "compiled+optimizer":
        return ["engine.compile=true"]
    if variant == "kernels":
        return []
    kept = sorted(ALL - {variant.removeprefix("kernels-")})
    return [f"engine.kernels={json.dumps(kept)}"]


def plan(precisions: list[str], chosen: list[str]) -> list[tuple[str, str]]:
    """Return (precision, variant) in the order of importance: first those that are compared in every precision."""
    pairs = []
    for ablations in (False, True):
        for precision in precisions:
            for variant in variants():
                wanted = not chosen or variant in chosen
                if wanted and variant.startswith("kernels-") == ablations:
                    pairs.append((precision, variant))
    return pairs


def run(
    precision: str, variant: str, arguments: argparse.Namespace, dataset: Dataset
) -> dict[str, Any]:
    """Measure one variant; an error is part of the answer."""
    settings = [*SETTING, *overrides(variant)]
    settings += SMOKE if arguments.smoke else [f"engine.precision={precision}"]
    result: dict[str, Any] = {"precision": precision, "variant": variant, "settings": settings}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        config = load_config(None, preset="inco-cifar10", overrides=settings)
        result |= asdict(measure(config, variant, arguments.rounds, arguments.warm_up, dataset))
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = time.perf_counter() - began
    return result


def release() -> None:
    """Free what a variant's federation took; captured graphs belong to reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def describe(result: dict[str, Any]) -> str:
    """Return one line about a result."""
    name = f"{result['precision']:5} {result['variant']:20}"
    if "error" in result:
        return f"{name} failed after {result['seconds']:.0f} s: {result['error'].splitlines()[0]}"
    return (
        f"{name} {result['ms_round']:7.1f} ± {result['ms_round_spread']:.1f} ms per round, "
        f"{result['ms_client_step']:.3f} ms per client step, first round {result['seconds_first_round']:.1f} s, "
        f"{result['peak_mb']:,.0f} MB, {result['seconds']:.0f} s in all"
    )


def main() -> None:
    """Measure all variants that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file, written after every variant"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are measured")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds before them")
    parser.add_argument("--precisions", default="fp16,tf32")
    parser.add_argument("--variants", default="", help="comma-separated; all if not given")
    parser.add_argument(
        "--budget", type=float, default=450.0, help="start no variant after this many seconds"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models on a CPU: does the script run?"
    )
    arguments = parser.parse_args()
    # Before anything else uses the GPU: CUDA reads it once, and the environment below names the GPU.
    request_hardware_queues()
    precisions = arguments.precisions.split(",")
    chosen = arguments.variants.split(",") if arguments.variants else []
    unknown = set(chosen) - set(variants())
    if unknown:
        parser.error(
            f"--variants: {', '.join(sorted(unknown))} unknown; allowed are {', '.join(variants())}"
        )
    began = time.perf_counter()
    dataset = synthetic_dataset("cifar10")
    results: list[dict[str, Any]] = []
    for precision, variant in plan(precisions, chosen):
        elapsed = time.perf_counter() - began
        if elapsed > arguments.budget:
            result = {
                "precision": precision,
                "variant": variant,
                "seconds": 0.0,
                "error": "not started: out of time",
            }
        else:
            print(f"[{elapsed:4.0f} s] {precision} {variant} ...", flush=True)
            result = run(precision, variant, arguments, dataset)
        results.append(result)
        print(describe(result), flush=True)
        content = {
            "environment": describe_environment(),
            "rounds": arguments.rounds,
            "warm_up": arguments.warm_up,
        }
        arguments.output.write_text(json.dumps({**content, "results": results}, indent=2))
        release()


if __name__ == "__main__":
    main()
