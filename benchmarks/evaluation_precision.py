"""Evaluate a finished run's last checkpoint in several precisions, with the obvious control.

    python benchmarks/evaluation_precision.py RUN --json out.json

For the EMA and for the raw global state: fp32 with plain layers, the precision that a run reports in (tf32 with fused
kernels on a GPU), and bf16, in which runs trained in 16 bits were evaluated before November 2026.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from motley.client.fused import apply_kernels
from motley.client.weights import TYPES, lower
from motley.core.device import place
from motley.core.part import State, take
from motley.data.device import DeviceData, device_data
from motley.federation import Federation
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.runs.folder import RunFolder

BATCH = 1000


def set_tf32(allowed: bool) -> None:
    """Allow or forbid tf32 in matrix products and convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@torch.no_grad()
def accuracy(model: nn.Module, data: DeviceData, dtype: torch.dtype) -> float:
    """Return the accuracy on all test images."""
    right = 0
    for rows in torch.arange(len(data), device=data.device).split(BATCH):
        images, labels = data.batch(rows)
        right += int((model(images.to(dtype)).argmax(1) == labels).sum())
    return right / len(data)


def evaluate(
    federation: Federation, state: State, data: DeviceData, precision: str
) -> dict[str, float]:
    """Return the accuracy per size, and their mean, in one precision."""
    set_tf32(precision == "tf32")
    scores = {}
    for size in federation.split.sizes:
        model = place(federation.split.build(size), federation.device).eval()
        model.load_state_dict(take(state, federation.split.part(size)))
        lower(model, precision)
        if precision != "fp32" and federation.device.type == "cuda":
            model = apply_kernels(model)
        scores[size] = accuracy(model, data, TYPES.get(precision, torch.float32))
    scores["mean"] = sum(scores.values()) / len(scores)
    return scores


def main() -> None:
    """Read the arguments, evaluate, and print one row per state and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = RunFolder.open(arguments.run)
    federation = Federation(folder.read_config())
    server = federation.to_device(read_checkpoint(checkpoints(folder.checkpoints)[-1]))
    data = device_data(
        federation.dataset.test, federation.config.data.transform, federation.device, augment=False
    )
    states = {"raw": server.state}
    if server.ema is not None:
        states["EMA"] = server.ema
    result = {
        "round": server.round_number,
        "trained in": federation.config.engine.precision,
        "accuracy": {},
    }
    for name, state in states.items():
        for precision in ("fp32", "tf32", "bf16"):
            scores = evaluate(federation, state, data, precision)
            result["accuracy"][f"{name}, {precision}"] = scores
            print(
                f"{name:4} {precision}  "
                + "  ".join(f"{size} {100 * score:.1f}" for size, score in scores.items())
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
