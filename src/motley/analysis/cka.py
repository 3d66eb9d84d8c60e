"""Linear CKA: a similarity of two models' features that is invariant to rotation and scaling.

Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019. The unbiased
estimate over mini-batches is from Nguyen et al., ICLR 2021. InCo uses it in Figures 1, 10, 12, 13
and 14, FedIN in Figures 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.features import features
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import model_of, open_run, probe_images, train_next_round
from motley.runs.metrics import OVERALL, MetricsLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The number of test images whose features are compared, and of images per mini-batch.
IMAGES, BATCH = 512, 256


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return |Y'X|^2 / (|X'X| |Y'Y|) for centered features with one row per example."""
    x = x.double() - x.double().mean(0)
    y = y.double() - y.double().mean(0)
    cross = torch.linalg.matrix_norm(y.T @ x) ** 2
    return float(cross / (torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)))


def unbiased_hsic(k: Tensor, ell: Tensor) -> Tensor:
    """Return the unbiased estimate of HSIC from two Gram matrices of n > 3 examples.

    Song et al., "Feature Selection via Dependence Maximization", JMLR 2012.
    """
    count = len(k)
    k = k - torch.diag(k.diagonal())
    ell = ell - torch.diag(ell.diagonal())
    product = k @ ell
    middle = k.sum() * ell.sum() / ((count - 1) * (count - 2))
    return (product.trace() + middle - 2 / (count - 2) * product.sum()) / (count * (count - 3))


def minibatch_cka(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return CKA computed from mini-batches of two models' features.

    HSIC is estimated without bias, so the result does not depend on the batch size.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in batches:
        k = x.double() @ x.double().T
        ell = y.double() @ y.double().T
        hsic = [unbiased_hsic(k, ell), unbiased_hsic(k, k), unbiased_hsic(ell, ell)]
        sums += torch.stack(hsic).cpu()
    return float(sums[0] / (sums[1] * sums[2]).sqrt())


def similarity(clients: Sequence[dict[str, Tensor]], batch: int = BATCH) -> dict[str, Tensor]:
    """Return the matrix of CKA between clients for every stage.

    `clients` has each client's features per stage. An entry is NaN if a client lacks the stage.
    """
    matrices: dict[str, Tensor] = {}
    for client in clients:
        for stage in client:
            matrices[stage] = torch.full((len(clients), len(clients)), torch.nan)
    for stage, matrix in matrices.items():
        for i, a in enumerate(clients):
            for j, b in enumerate(clients[: i + 1]):
                if stage in a and stage in b:
                    pairs = zip(a[stage].split(batch), b[stage].split(batch), strict=True)
                    matrix[i, j] = matrix[j, i] = minibatch_cka(pairs)
    return matrices


def mean_off_diagonal(matrix: Tensor) -> float:
    """Return the mean similarity of two different clients."""
    others = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
    return float(others.nanmean())


@analysis(
    "cka", "similarity of clients' features per stage: mean, client x client, and over rounds"
)
def cka(paths: Sequence[Path]) -> Findings:
    """Compare the clients of the round after every checkpoint."""
    rows: list[tuple[Any, ...]] = []
    newest: dict[str, dict[str, Tensor]] = {}
    for path in paths:
        accuracies = {}
        for line in MetricsLog(path / "metrics.jsonl").read():
            if "accuracy" in line:  # not all tasks have one
                accuracies[line["round"]] = line["accuracy"][OVERALL]
        with open_run(path) as (federation, servers):
            images, _ = probe_images(federation, IMAGES)
            for server in servers:
                number = server.round_number
                clients = []
                for trained in train_next_round(federation, server):
                    model = model_of(federation, trained.size, trained.state)
                    clients.append(features(model, images))
                newest[path.name] = similarity(clients)
                for stage, matrix in newest[path.name].items():
                    mean = mean_off_diagonal(matrix)
                    rows.append((path.name, number, stage, mean, accuracies.get(number)))
    return Findings(("run", "round", "stage", "cka", "accuracy"), rows, _draw(newest, rows))


def _draw(newest: dict[str, dict[str, Tensor]], rows: list[tuple[Any, ...]]) -> Figure:
    """Draw one row of plots per run: mean per stage, over rounds, and a matrix per stage."""
    columns = max(len(matrices) for matrices in newest.values())
    figure = new_figure(3 * (columns + 2), 3 * len(newest))
    axes = figure.subplots(len(newest), columns + 2, squeeze=False)
    for axes_of_run, (run, matrices) in zip(axes, newest.items(), strict=True):
        mean_axis, rounds_axis, *matrix_axes = axes_of_run
        means = [mean_off_diagonal(matrix) for matrix in matrices.values()]
        mean_axis.plot(list(matrices), means, marker="o")
        mean_axis.set(title=f"{run}: mean", ylim=(0, 1.02), ylabel="CKA")
        mean_axis.tick_params(axis="x", rotation=30)
        _draw_rounds(rounds_axis, [row for row in rows if row[0] == run])
        for axis, (stage, matrix) in zip(matrix_axes, matrices.items(), strict=False):
            axis.imshow(matrix, vmin=0, vmax=1, cmap="magma")
            axis.set(title=stage, xlabel="client", ylabel="client")
        for axis in matrix_axes[len(matrices) :]:
            axis.axis("off")
    return figure


def _draw_rounds(axis: Axes, rows: list[tuple[Any, ...]]) -> None:
    """Draw the CKA of every stage, and the accuracy, over rounds."""
    curves: dict[str, list[tuple[int, float]]] = {}
    accuracies: dict[int, float] = {}
    for _, number, stage, mean, accuracy in rows:
        curves.setdefault(stage, []).append((number, mean))
        if accuracy is not None:
            accuracies[number] = accuracy
    for stage, points in curves.items():
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=stage)
    if accuracies:
        points = sorted(accuracies.items())
        axis.plot(*zip(*points, strict=True), color="black", linestyle="--", label="accuracy")
    axis.set(title="over rounds", ylim=(0, 1.02), xlabel="round")
    axis.legend(fontsize="x-small")
