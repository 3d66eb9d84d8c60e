"""Means per class, for methods that exchange one vector per class (FedProto, FD).

A client sums up vectors while it trains, in the steps themselves, so that no further pass over its
data is needed. The server averages the clients' means, class by class, over the clients that have
the class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.step import Step

#: Names in a payload: the means per class (0 for classes that the client does not have), and the
#: weights of the classes (0 for classes that the client does not have).
MEANS, WEIGHTS = "means", "weights"
_SCRATCH = "class sums"


def start_sums(step: Step, classes: int, width: int, skipped_steps: int = 0) -> None:
    """Start a client's sums, which leave out the first `skipped_steps` steps.

    Not for use in a step.
    """
    device = step.round.device
    step.keep(
        _SCRATCH,
        {
            "sums": torch.zeros((classes, width), device=device),
            "counts": torch.zeros(classes, device=device),
            "skip": torch.full((), float(skipped_steps), device=device),
        },
    )


def add_to_sums(step: Step, vectors: Tensor) -> None:
    """Add the vectors of a batch to the sums of their classes. Called once per step."""
    scratch = step.scratch[_SCRATCH]
    # A captured step cannot decide on the host whether it counts, so its batch has a weight.
    weight = (scratch["skip"] <= 0).float()
    scratch["sums"].index_add_(0, step.targets, vectors.detach().float() * weight)
    scratch["counts"].index_add_(0, step.targets, weight.expand(len(step.targets)))
    scratch["skip"].sub_(1.0)


def class_means(step: Step, *, counted: bool = False) -> State:
    """Return a client's means and weights for its payload.

    The weight of a class is 1 if the client has the class or, with `counted`, the number of
    examples that the mean is over.
    """
    scratch = step.scratch[_SCRATCH]
    counts = scratch["counts"]
    means = scratch["sums"] / counts.clamp(min=1.0)[:, None]
    return {MEANS: means, WEIGHTS: counts.clone() if counted else (counts > 0).float()}


def mean_over_clients(payloads: Sequence[State]) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of every class over clients, and 1 for each class that some have."""
    means = torch.stack([payload[MEANS] for payload in payloads])
    weights = torch.stack([payload[WEIGHTS] for payload in payloads]).clamp(min=0.0)
    total = weights.sum(0)
    known = total > 0
    mean = (weights[..., None] * means).sum(0) / torch.where(known, total, 1.0)[:, None]
    return mean, known.float()


def check_payload(update: ClientUpdate, classes: int, width: int) -> None:
    """Raise an error if a payload does not have one vector of a width per class."""
    shapes = {MEANS: (classes, width), WEIGHTS: (classes,)}
    for name, shape in shapes.items():
        if tuple(update.payload[name].shape) != shape:
            raise ValueError(f"{name!r} has shape {tuple(update.payload[name].shape)}, not {shape}")
