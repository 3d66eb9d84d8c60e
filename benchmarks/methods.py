"""What methods cost: milliseconds per round of each method, in one process.

The setting is that of `docs/benchmarks.md`: 100 clients of five ResNets, 10 per round, 5 epochs of batch 64,
evaluation of all sizes in every round, random images of CIFAR-10's shape. All methods sample the same clients with the
same data in the same rounds. FedAvg is measured first and again at the end: the control of the machine's own drift.

    python benchmarks/methods.py --output methods.json
    python benchmarks/methods.py --output methods.json --methods fedgen,feddf
    python benchmarks/methods.py --output methods.json --smoke    # tiny models, for any machine

Results are written after every method. A method that fails is reported with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernels import SMOKE, release

from motley.bench import measure, synthetic_dataset
from motley.config import load_config
from motley.config.paper_names import NAMES
from motley.data import Dataset
from motley.engine.device import request_hardware_queues
from motley.methods import METHODS
from motley.runs.folder import describe_environment

SETTING = (
    "engine.slots=10",
    "model.resnet.trim_dead_taps=true",
    "evaluation.batch_size=5000",
    "server.inco.variant=off",
)
#: Public images, for methods that distill.
PUBLIC = ("public.name=held-out", "public.samples=5000")
MEASURED = (
    "fedavg",
    "fedprox",
    "fedin",
    "fedgen",
    "feddf",
    "fedet",
    "spherefed",
    "ccvr",
    "fedproto",
    "fd",
    "fedmd",
    "FedPer",
    "FedBN",
    "FedRep",
    "Ditto",
    "fedavg",
)


def run(name: str, arguments: argparse.Namespace, dataset: Dataset) -> dict[str, Any]:
    """Measure one method; an error is part of the answer."""
    settings = [*SETTING, f"method.name={name}"]
    method = NAMES[name]["method.name"] if name in NAMES else name
    if METHODS[method].requirements.public_data:
        settings += PUBLIC
    settings += SMOKE if arguments.smoke else [f"engine.precision={arguments.precision}"]
    result: dict[str, Any] = {"method": name, "settings": settings}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        config = load_config(None, preset="inco-cifar10", overrides=settings)
        result |= asdict(measure(config, name, arguments.rounds, arguments.warm_up, dataset))
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def describe(result: dict[str, Any], fedavg: float) -> str:
    """Return one line about a result."""
    if "error" in result:
        return f"{result['method']:10} failed: {result['error'].splitlines()[0]}"
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in result["share"].items())
    return (
        f"{result['method']:10} {result['ms_round']:7.1f} ± {result['ms_round_spread']:.1f} ms per round, "
        f"{result['ms_round'] / fedavg:.2f} of FedAvg's, {result['peak_mb']:,.0f} MB ({shares})"
    )


def main() -> None:
    """Measure all methods that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are measured")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds before them")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--methods", default=",".join(MEASURED), help="comma-separated")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models on a CPU: does the script run?"
    )
    arguments = parser.parse_args()
    request_hardware_queues()
    dataset = synthetic_dataset("cifar10")
    results: list[dict[str, Any]] = []
    for name in arguments.methods.split(","):
        result = run(name, arguments, dataset)
        results.append(result)
        first = results[0].get("ms_round", float("nan"))
        print(describe(result, first), flush=True)
        content = {"environment": describe_environment(), "results": results}
        arguments.output.write_text(json.dumps(content, indent=2))
        release()


if __name__ == "__main__":
    main()
