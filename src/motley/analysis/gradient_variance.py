"""Inter-client gradient variance (CGV), FedImpro's Definition 4.2:

    CGV = sum_m p_m |g_m - g|^2,    g = sum_m p_m g_m,    p_m = n_m / N

g_m is the gradient of client m's mean loss F_m, and n_m its number of examples (Section 3.1).
They are computed for the clients of the round after a checkpoint, before their first step: of
each client's mean loss over all of its examples, at the part that it receives. The variance of a
layer is over the clients that hold it. Theorem 4.2 is about the high level of a model, so the sums
over both levels are reported, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motley.analysis.divergence import (
    HIGH,
    LOW,
    WHOLE,
    draw,
    in_global_shape,
    layer_of,
    layer_squares,
    layers_in_order,
)
from motley.analysis.findings import Findings, analysis
from motley.analysis.replay import all_checkpoints, client_examples
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.engine import Job
from motley.federation import Federation
from motley.methods.fedimpro_cut import Cut
from motley.models.stages import chain_of, owned

#: The maximum number of examples per forward pass.
BATCH = 256


def gradient_variance(
    gradients: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, float]:
    """Return the mean of |gradient_m - mean gradient|^2 per layer, over the clients that hold it.

    Both means are weighted; `weights` are the clients' numbers of examples. Layers that only one
    client holds are left out.
    """
    variances = {}
    for layer, squares in layer_squares(gradients, weights).items():
        total = sum(weights[position] for position in squares)
        weighted = sum(weights[position] * square for position, square in squares.items())
        variances[layer] = weighted / total
    return variances


@analysis(
    "variance",
    "variance of clients' gradients before a local update (CGV), per layer and over rounds",
)
def variance(paths: Sequence[Path]) -> Findings:
    """Compute the gradients of the clients of the round after every checkpoint."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        round_number = server.round_number + 1
        gradients, weights = [], []
        for job in federation.jobs(server):
            examples = len(federation.partition.of(job.client))
            # BatchNorm in training mode needs more than one example.
            if examples > 1:
                weights.append(examples)
                gradient = client_gradient(federation, job)
                gradients.append(
                    in_global_shape(federation, job.size, round_number, job.client, gradient)
                )
        layers = gradient_variance(gradients, weights)
        values = {WHOLE: sum(layers.values()), **_levels(federation, layers)}
        for layer in layers_in_order(federation, layers):
            values[layer] = layers[layer]
        for layer, value in values.items():
            rows.append((run, server.round_number, layer, value))
    columns = ("run", "round", "layer", "variance")
    return Findings(columns, rows, draw(rows, "inter-client gradient variance"))


def _levels(federation: Federation, layers: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over the low and the high level.

    Models are cut where the run's method cuts them, or else in the middle.
    """
    split = federation.split
    try:
        stage = getattr(federation.config.method, "cut", "")
        cut = Cut(split, federation.method.info.input_shape, stage)
    except MotleyError:
        # A model that is not a chain of stages has no levels.
        return {}
    high_layers = set()
    for size, blueprint in split.blueprints.items():
        part = split.part(size)
        _, high_level = cut.levels(chain_of(blueprint.module), size)
        for local in owned(blueprint.module, high_level):
            high_layers.add(layer_of(part[local].name))
    sums = {LOW: 0.0, HIGH: 0.0}
    for layer, value in layers.items():
        sums[HIGH if layer in high_layers else LOW] += value
    return sums


def client_gradient(federation: Federation, job: Job) -> State:
    """Return the gradient of a client's mean loss over all of its examples, in training mode."""
    model = federation.split.build(job.size).to(federation.device)
    model.load_state_dict(job.state)
    model.train()
    inputs, targets = client_examples(federation, job.client)
    passes = -(-len(inputs) // BATCH)
    batches = zip(inputs.tensor_split(passes), targets.tensor_split(passes), strict=True)
    for input_batch, target_batch in batches:
        losses = federation.task.example_losses(model(input_batch), target_batch)
        (losses.sum() / len(inputs)).backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        # A parameter that the loss does not depend on has no gradient.
        gradient[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient
