"""Milliseconds per round of several variants of one setting, over the same rounds in one process.

    python benchmarks/rounds.py --output rounds.json \
      --variant "fp16: engine.precision=fp16" \
      --variant "no conv: engine.precision=fp16; engine.kernels=['augment','norm','optimizer','pool','stem']"

Rounds of unlike clients differ by half of their median, so two medians over different rounds say little. Here every variant
plays the same rounds from the same initial state, three times: once to create slots and to capture steps, then twice to
measure. The time of a round is the smaller one of the two. Variants are compared by the median of their rounds' ratios.
A variant that fails is written down with its error. After `--seconds`, the rest is left out.
The setting is that of `docs/benchmarks.md`: 100 clients of five ResNets, 10 per round, 5 epochs of batch 64, InCo,
evaluation of all sizes in every round, random images of CIFAR-10's shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from motley.bench import synthetic_dataset
from motley.config import load_config
from motley.data import Dataset
from motley.engine.device import request_hardware_queues
from motley.federation import Federation
from motley.runs.folder import describe_environment
from motley.server.record import PendingRecord

SETTING = ("engine.slots=10", "model.resnet.trim_dead_taps=true", "evaluation.batch_size=5000")


def play(federation: Federation, rounds: int, latest: float) -> list[float]:
    """Run the first rounds, and return the milliseconds of each.

    `latest`: no round begins after this time.
    """
    server = federation.initial_state()
    before: PendingRecord | None = None
    milliseconds = []
    begin = time.perf_counter()
    for number in range(rounds):
        if begin > latest:
            raise TimeoutError(f"out of time in round {number + 1} of {rounds}")
        server, record = federation.queue_round(server, more_rounds=number + 1 < rounds)
        # As in a run, the scores of a round are awaited only after the next round has been queued.
        if before is not None:
            before.read()
        before = record
        if number == rounds - 1:
            record.read()
        end = time.perf_counter()
        milliseconds.append(1000 * (end - begin))
        begin = end
    return milliseconds


def measure(
    preset: str, overrides: list[str], rounds: int, dataset: Dataset, end: float
) -> dict[str, Any]:
    """Return the times of a variant."""
    config = load_config(None, preset=preset, overrides=overrides)
    federation = Federation(config, dataset=dataset)
    first, *measured = (play(federation, rounds, end) for _ in range(3))
    best = [min(pair) for pair in zip(*measured, strict=True)]
    return {
        "overrides": overrides,
        "first_round_s": first[0] / 1000,
        "runs": measured,
        "median": statistics.median(best),
        "mean": statistics.mean(best),
        "best": best,
    }


def main() -> None:
    """Measure all variants; the ratios are to the first of them that works."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variant", action="append", required=True, help="NAME: KEY=VALUE; ...")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--preset", default="inco-cifar10")
    parser.add_argument("--set", action="append", default=[], help="for all variants")
    parser.add_argument("--seconds", type=float, default=540, help="begin no round after this time")
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    request_hardware_queues()
    dataset = synthetic_dataset("cifar10")
    content: dict[str, Any] = {"environment": describe_environment(), "rounds": arguments.rounds}
    results: dict[str, dict[str, Any]] = {}
    reference: list[float] = []
    for variant in arguments.variant:
        name, _, settings = variant.partition(":")
        own = [setting.strip() for setting in settings.split(";") if setting.strip()]
        overrides = [*SETTING, *arguments.set, *own]
        try:
            result = measure(arguments.preset, overrides, arguments.rounds, dataset, end)
        except Exception as error:
            traceback.print_exc()
            result = {"overrides": overrides, "error": f"{type(error).__name__}: {error}"}
        else:
            reference = reference or result["best"]
            ratios = [mine / other for mine, other in zip(result["best"], reference, strict=True)]
            result["ratio"] = statistics.median(ratios)
        results[name] = result
        print(describe(name, result), flush=True)
        arguments.output.write_text(json.dumps({**content, "results": results}, indent=1))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def describe(name: str, result: dict[str, Any]) -> str:
    """Return one line about a variant."""
    if "error" in result:
        return f"{name:30} {result['error'].splitlines()[0]}"
    return (
        f"{name:30} median {result['median']:7.1f}  mean {result['mean']:7.1f}  "
        f"ratio {result['ratio']:.3f}  first round {result['first_round_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
