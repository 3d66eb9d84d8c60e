"""FedLC: its loss by hand, and where it is FedAvg."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.errors import MotleyError
from motley.methods.fedlc import HUGE, margins
from tests.methods.turns import after, federation_of, jobs_of, same_bits, seated

SKEWED = ("data.partition.name=dirichlet", "data.partition.alpha=0.1")


def test_margins_by_hand() -> None:
    expected = torch.tensor([2.0, 1.0, 0.2, HUGE])
    torch.testing.assert_close(margins(torch.tensor([1.0, 16.0, 1e4, 0.0]), 2.0), expected)
    assert not margins(torch.tensor([3.0, 0.0]), 0.0).any()


def test_the_loss_by_hand() -> None:
    federation = federation_of(*SKEWED, "method.tau=1.5", name="fedlc")
    server = federation.initial_state()
    job = jobs_of(federation, server)[0]
    learner = seated(federation, job)
    partition = federation.engine.clients.partition  # type: ignore[attr-defined]
    labels = learner.data.targets[torch.from_numpy(partition.of(job.client))]
    counts = torch.bincount(labels, minlength=10).tolist()
    assert 0 in counts
    inputs, targets = learner.batches.next(learner.lengths[0])
    learner.inputs, learner.targets = inputs, targets
    logits: Tensor = learner.model(inputs)
    total = 0.0
    for row, target in zip(logits.double().tolist(), targets.tolist(), strict=True):
        # The paper's formula. A class that the client does not have has no term.
        terms = {}
        for label, count in enumerate(counts):
            if count:
                terms[label] = math.exp(row[label] - 1.5 * count**-0.25)
        total -= math.log(terms[target] / sum(terms.values()))
    assert learner.algorithm.loss(learner).item() == pytest.approx(total / len(targets), rel=1e-4)


def test_label_smoothing_is_refused() -> None:
    """It would raise the logits of classes that a client does not have above all others."""
    smoothing = "training.label_smoothing=0.1"
    with pytest.raises(MotleyError, match=r"label_smoothing = 0.1: gives a part of every target"):
        federation_of(*SKEWED, smoothing, name="fedlc")
    counts, logits = torch.tensor([50.0, 50.0, 0.0]), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(5000):
        optimizer.zero_grad()
        calibrated = (logits - margins(counts, 1.0))[None]
        F.cross_entropy(calibrated, torch.tensor([0]), label_smoothing=0.1).backward()
        optimizer.step()
    assert logits[2] > logits[0] + 40


def test_without_calibration_it_is_fedavg() -> None:
    _, plain = after(2, *SKEWED, name="fedavg")
    _, calibrated = after(2, *SKEWED, "method.tau=0", name="fedlc")
    assert same_bits(plain.state, calibrated.state)
    _, other = after(2, *SKEWED, name="fedlc")
    assert not same_bits(plain.state, other.state)
