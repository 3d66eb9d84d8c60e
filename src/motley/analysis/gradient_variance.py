"""How unlike clients' gradients are: the inter-client gradient variance (CGV) of FedImpro's Definition 4.2.

The analysis looks at the clients of the round after a checkpoint before they take a step: the gradient of each on all
its own examples, at the part it is sent. A layer's variance is over the clients that hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from motley.analysis import ANALYSES, Findings
from motley.analysis.divergence import WHOLE, draw, in_order, layer_squares, placed
from motley.analysis.replay import kept_rounds, own_examples
from motley.engine import Job
from motley.federation import Federation
from motley.round import Record
from motley.splits.part import State

BATCH = 256
"""Most examples of one pass."""


class GradientVariance(NamedTuple):
    """The mean over clients of |gradient_i - mean gradient|^2, of the two levels of a model (Eq. 3)."""

    low: float
    high: float

    @property
    def whole(self) -> float:
        """That of all parameters together."""
        return self.low + self.high


def gradient_variance(
    gradients: Sequence[Mapping[str, Tensor]], high: Collection[str] = (), weights: Sequence[float] = ()
) -> GradientVariance:
    """Return how clients' gradients vary, with the names in `high` apart from the others.

    `weights` are the clients' shares in both means; none: all count the same.
    """
    given = torch.tensor(weights or [1.0] * len(gradients), dtype=torch.float64)
    shares = given / given.sum()
    levels = {True: 0.0, False: 0.0}
    for name in gradients[0]:
        rows = torch.stack([gradient[name].detach().double().flatten().cpu() for gradient in gradients])
        levels[name in high] += float(shares @ (rows - shares @ rows).square().sum(1))
    return GradientVariance(low=levels[False], high=levels[True])


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
        layers = layer_variance(gradients)
        found = {WHOLE: sum(layers.values()), **{n: layers[n] for n in in_order(federation, layers)}}
        rows += [(run, server.round_number, layer, value) for layer, value in found.items()]
    return Findings(("run", "round", "layer", "variance"), rows, draw(rows, "inter-client gradient variance"))


def layer_variance(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return a layer's mean over its holders of |gradient_i - mean gradient|^2, where two clients or more hold it."""
    return {layer: sum(squares) / len(squares) for layer, squares in layer_squares(gradients).items()}


def own_gradient(federation: Federation, job: Job) -> State:
    """Return the gradient of a client's mean loss over all its examples, at the part it is sent; in training mode."""
    model = federation.split.build(job.size).to(federation.device)
    model.load_state_dict(job.state)
    images, labels = own_examples(federation, job.client)
    passes = -(-len(images) // BATCH)
    for some, answers in zip(images.tensor_split(passes), labels.tensor_split(passes), strict=True):
        (F.cross_entropy(model.train()(some), answers, reduction="sum") / len(images)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
