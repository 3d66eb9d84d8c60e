"""What a method costs a client: parameters, traffic, computation and memory (FedIN, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from motley.analysis import ANALYSES, Findings
from motley.analysis.replay import global_model, opened, probe_images
from motley.federation import Federation, Server, size_in_bytes
from motley.runs.metrics import MetricsLog

COLUMNS = ("run", "million parameters", "MB down", "MB up", "million FLOPs an image", "MB kept by a client")


def flops(model: torch.nn.Module, images: torch.Tensor) -> int:
    """Return the floating-point operations of one image's way forward."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images[:1])
    return counter.get_total_flops()


def _kept(federation: Federation, server: Server, size: str) -> int:
    """Return the bytes of a client's model and of what its method remembers."""
    client = federation.sizes.index(size)
    state = federation.job(server, server.round_number + 1, client).state
    return size_in_bytes(state) + size_in_bytes(federation.method.memory(size, state))


@ANALYSES.register("overhead", "parameters, traffic a round, FLOPs and memory a client, a method")
def overhead(paths: Sequence[Path]) -> Findings:
    """Count, as means over sizes; traffic is what was sent, a client and round."""
    rows: list[tuple[Any, ...]] = []
    for path in paths:
        lines = MetricsLog(path / "metrics.jsonl").read()
        asked = sum(len(line["clients"]) for line in lines)
        with opened(path) as (federation, servers):
            images, _ = probe_images(federation, 1)
            models = {size: global_model(federation, servers[-1], size) for size in federation.split.sizes}
            rows.append(
                (
                    path.name,
                    fmean(sum(p.numel() for p in model.parameters()) for model in models.values()) / 1e6,
                    sum(line["bytes"]["down"] for line in lines) / asked / 1e6,
                    sum(line["bytes"]["up"] for line in lines) / asked / 1e6,
                    fmean(flops(model, images) for model in models.values()) / 1e6,
                    fmean(_kept(federation, servers[-1], size) for size in models) / 1e6,
                )
            )
    figure = Figure(figsize=(3 * (len(COLUMNS) - 1), 1.2 + 0.4 * len(rows)), layout="constrained")
    for number, axis in enumerate(figure.subplots(1, len(COLUMNS) - 1), start=1):
        bars = axis.barh([row[0] for row in rows], [row[number] for row in rows])
        axis.bar_label(bars, fmt="%.3g")
        axis.set(title=COLUMNS[number])
        axis.tick_params(axis="y", labelleft=number == 1)
    return Findings(COLUMNS, rows, figure)
