"""The model and the metric of `appfl_peer.py`. APPFL loads both from a file, by their names."""

from __future__ import annotations

import numpy as np
from torch import nn

from benchmarks.peers.federation import WORKLOADS, initial_model


def model(workload: str) -> nn.Module:
    """Return a workload's model with its initial weights."""
    return initial_model(WORKLOADS[workload])


def accuracy(targets: np.ndarray, logits: np.ndarray) -> float:
    """Return the fraction of correct predictions."""
    return float((logits.argmax(axis=1) == targets.reshape(-1)).mean())
