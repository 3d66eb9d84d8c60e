"""The accuracy of the global models for every natural client of the test set.

A run scores clients that train (`evaluation.per_client`). The clients of a test set need not be
among them: the test digits of `mnist-writers` are of other writers. Their scores say how new
clients would fare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import global_model, open_run
from motley.core.errors import MotleyError
from motley.data.device import DeviceData, device_data
from motley.federation import Federation
from motley.server.client_scores import spread


@analysis("test-clients", "accuracy of every size for each natural client of the test set")
def clients(paths: Sequence[Path]) -> Findings:
    """Score the models of each run's last checkpoint."""
    rows: list[tuple[Any, ...]] = []
    notes = []
    figure = new_figure(5 * len(paths), 4)
    axes = figure.subplots(1, len(paths), squeeze=False, sharey=True)[0]
    for axis, path in zip(axes, paths, strict=True):
        with open_run(path) as (federation, servers):
            server = servers[-1]
            owners = _test_clients_of(federation, path)
            transform = federation.config.data.transform
            test = federation.dataset.test
            data = device_data(test, transform, federation.device, augment=False)
            names, numbers = np.unique(owners, return_inverse=True)
            examples = np.bincount(numbers)
            for size in federation.split.sizes:
                with federation.numerics():
                    model = global_model(federation, server, size)
                    right = _is_right(model, data, federation.config.evaluation.batch_size)
                accuracy = np.bincount(numbers, weights=right) / examples
                for name, count, value in zip(names, examples, accuracy, strict=True):
                    row = (path.name, server.round_number, size, int(name), int(count))
                    rows.append((*row, float(value)))
                over = spread(accuracy.tolist(), examples.tolist(), higher_is_better=True)
                notes.append(
                    f"{path.name}, {size}: {over.clients} clients, mean {100 * over.mean:.1f} %, "
                    f"spread {100 * over.std:.1f}, worst tenth {100 * over.worst_tenth:.1f} %"
                )
                axis.plot(np.sort(100 * accuracy), label=size)
        axis.set(title=path.name, xlabel="clients, the worst first", ylabel="accuracy (%)")
        axis.legend()
    columns = ("run", "round", "size", "client", "examples", "accuracy")
    return Findings(columns, rows, figure, tuple(notes))


def _test_clients_of(federation: Federation, path: Path) -> np.ndarray:
    test = federation.dataset.test
    if test.clients is None:
        raise MotleyError(
            f"motley analyze test-clients: the data set of {path}, {federation.dataset.name!r}, "
            "does not record whose test examples they are."
        )
    if test.targets.dtype != np.int64 or test.targets.ndim != 1:
        raise MotleyError(
            "motley analyze test-clients: is for one class or one next token per example, and "
            f"the targets of {path} have the shape {test.targets.shape[1:]} and the type "
            f"{test.targets.dtype}."
        )
    return test.clients


def _is_right(model: nn.Module, data: DeviceData, batch_size: int) -> np.ndarray:
    """Return for each example whether the model's largest output is the target's."""
    parts = []
    with torch.no_grad():
        for rows in torch.arange(len(data), device=data.device).split(batch_size):
            inputs, targets = data.batch(rows)
            parts.append(model(inputs).argmax(dim=1) == targets)
    return torch.cat(parts).cpu().numpy()
