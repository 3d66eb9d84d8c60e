"""A user's network against the built-in one of the same shape: milliseconds per client step.

torchvision's ResNet18, unmodified, and Motley's own have the same layers. Both train on random images of CIFAR-10's
shape, 10 of 100 clients per round. The built-in network is measured with its hand-written kernels, which a user's
network cannot have, and compiled; the user's network plain and compiled (`engine.compile`).

    python benchmarks/user_model.py --output user_model.json
    python benchmarks/user_model.py --output user_model.json --smoke    # one round on a CPU, without torchvision
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernels import release
from torch import nn

from motley.bench import measure, synthetic_dataset
from motley.engine.device import request_hardware_queues
from motley.federation import Federation
from motley.runs.folder import describe_environment

BUILT_IN, FOREIGN = "built-in", "torchvision"
#: (network, engine settings) in the order of measurement.
MEASURED = (
    (BUILT_IN, {"precision": "fp16"}),
    (FOREIGN, {"precision": "fp16", "compile": True}),
    (FOREIGN, {"precision": "fp16"}),
    (BUILT_IN, {"precision": "fp16", "compile": True}),
    (BUILT_IN, {"precision": "tf32"}),
    (FOREIGN, {"precision": "tf32", "compile": True}),
    (BUILT_IN, {"precision": "fp16"}),
)


def torchvision_resnet18(num_classes: int) -> nn.Module:
    """Return torchvision's own network."""
    from torchvision.models import resnet18

    network: nn.Module = resnet18(num_classes=num_classes)
    return network


def small_network(num_classes: int) -> nn.Module:
    """Return a network for a machine without torchvision."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, num_classes)
    )


def run(network: str, engine: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one network with one setting of the engine."""
    foreign: Callable[..., nn.Module] = small_network if arguments.smoke else torchvision_resnet18
    built_in = "cnn" if arguments.smoke else "resnet18"
    settings: dict[str, Any] = {
        "engine": {"slots": 10, **({} if arguments.smoke else engine)},
        "evaluation": {"batch_size": 5000, "every": 100},
    }
    described = Federation(
        models={"theirs": foreign} if network == FOREIGN else [built_in],
        data=synthetic_dataset("cifar10"),
        partition="iid",
        clients=100,
        clients_per_round=10,
        training={"rounds": 100, "epochs": 2, "batch_size": 64},
        settings=settings,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    label = ", ".join([network, *(f"{key}={value}" for key, value in engine.items())])
    timing = measure(
        described.config, label, arguments.rounds, arguments.warm_up, described.dataset
    )
    return asdict(timing)


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that are measured")
    parser.add_argument("--warm-up", type=int, default=5, help="rounds before them")
    parser.add_argument("--smoke", action="store_true", help="tiny networks: does the script run?")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.warm_up = 1, 0
    request_hardware_queues()
    results: list[dict[str, Any]] = []
    for network, engine in MEASURED[:2] if arguments.smoke else MEASURED:
        result = run(network, engine, arguments)
        results.append(result)
        ratio = result["ms_client_step"] / results[0]["ms_client_step"]
        print(
            f"{result['setting']:45} {result['ms_client_step']:.3f} ms per step, {ratio:.2f}, "
            f"first round {result['seconds_first_round']:.1f} s",
            flush=True,
        )
        content = {"environment": describe_environment(), "results": results}
        arguments.output.write_text(json.dumps(content, indent=2))
        release()


if __name__ == "__main__":
    main()
