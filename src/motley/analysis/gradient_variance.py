"""How unlike clients' gradients are: the inter-client gradient variance (CGV) of FedImpro's Definition 4.2.

The analysis looks at the clients of the round after a checkpoint before they take a step: the gradient of each on all
its own examples, at the part it is sent. A layer's variance is over the clients that hold it. Theorem 4.2 is about the
high level of a model, so the sums over both levels are told, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.analysis.divergence import HIGH, LOW, WHOLE, draw, in_order, layer_of, layer_squares, placed
from motley.analysis.findings import ANALYSES, Findings
from motley.analysis.replay import kept_rounds, own_examples
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.engine import Job
from motley.federation import Federation
from motley.methods.levels import Levels
from motley.models.stages import chain_of, owned
from motley.round import Record

BATCH = 256
"""Most examples of one pass."""


def gradient_variance(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return a layer's mean over its holders of |gradient_i - mean gradient|^2, where two clients or more hold it."""
    return {layer: sum(squares) / len(squares) for layer, squares in layer_squares(gradients).items()}


@ANALYSES.register("variance", "how unlike clients' gradients are before a turn (CGV), a layer and over rounds")
def variance(paths: Sequence[Path]) -> Findings:
    """Take the gradients of the clients of the round after every checkpoint that was kept."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in kept_rounds(paths):
        number = server.round_number + 1
        gradients = [
            placed(federation, job.size, number, job.client, own_gradient(federation, job))
            for job in federation.jobs(server, Record(number))
            if len(federation.partition.of(job.client)) > 1
        ]
        layers = gradient_variance(gradients)
        found = {WHOLE: sum(layers.values()), **_levels(federation, layers)}
        found.update((layer, layers[layer]) for layer in in_order(federation, layers))
        rows += [(run, server.round_number, layer, value) for layer, value in found.items()]
    return Findings(("run", "round", "layer", "variance"), rows, draw(rows, "inter-client gradient variance"))


def _levels(federation: Federation, layers: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over the low and the high level: cut as the run's method cuts them, or else in the middle."""
    split = federation.split
    try:
        levels = Levels(federation.method.info, getattr(federation.config.method, "cut", ""))
    except MotleyError:  # a model that is no chain of stages has no levels
        return {}
    high = set()
    for size, blueprint in split.blueprints.items():
        part, (_, above) = split.part(size), levels.of(chain_of(blueprint.module), size)
        high |= {layer_of(part[local].name) for local in owned(blueprint.module, above)}
    return {
        LOW: sum(value for layer, value in layers.items() if layer not in high),
        HIGH: sum(value for layer, value in layers.items() if layer in high),
    }


def own_gradient(federation: Federation, job: Job) -> State:
    """Return the gradient of a client's mean loss over all its examples, at the part it is sent; in training mode."""
    model = federation.split.build(job.size).to(federation.device)
    model.load_state_dict(job.state)
    images, labels = own_examples(federation, job.client)
    passes = -(-len(images) // BATCH)
    for some, answers in zip(images.tensor_split(passes), labels.tensor_split(passes), strict=True):
        (F.cross_entropy(model.train()(some), answers, reduction="sum") / len(images)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
