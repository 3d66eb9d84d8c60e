"""Linear CKA: how alike the features of two models are, whatever rotates or scales them.

Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019; the unbiased estimate over
mini-batches is that of Nguyen et al., ICLR 2021. InCo looks at it in Figures 1, 10, 12, 13 and 14, FedIN in 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from motley.analysis.features import features
from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.replay import model_of, next_round, opened, probe_images
from motley.runs.metrics import OVERALL, MetricsLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES, BATCH = 512, 256


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return |Y'X|^2 / (|X'X| |Y'Y|) for centred features, a row an example."""
    x, y = (features.double() - features.double().mean(0) for features in (x, y))
    cross = torch.linalg.matrix_norm(y.T @ x) ** 2
    return float(cross / (torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)))


def unbiased_hsic(k: Tensor, ell: Tensor) -> Tensor:
    """Return the unbiased estimate of HSIC from two Gram matrices of n > 3 examples (Song et al., JMLR 2012)."""
    count = len(k)
    k, ell = (gram - torch.diag(gram.diagonal()) for gram in (k, ell))
    product = k @ ell
    middle = k.sum() * ell.sum() / ((count - 1) * (count - 2))
    return (product.trace() + middle - 2 / (count - 2) * product.sum()) / (count * (count - 3))


def minibatch_cka(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return CKA from batches of two models' features: unbiased HSIC, so that the size of a batch is no matter."""
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in batches:
        k, ell = (features.double() @ features.double().T for features in (x, y))
        sums += torch.stack([unbiased_hsic(k, ell), unbiased_hsic(k, k), unbiased_hsic(ell, ell)]).cpu()
    return float(sums[0] / (sums[1] * sums[2]).sqrt())


def similarity(clients: Sequence[dict[str, Tensor]], batch: int = BATCH) -> dict[str, Tensor]:
    """Return for every stage the matrix of CKA between clients; NaN where one of two has no such stage."""
    names = dict.fromkeys(stage for one in clients for stage in one)
    matrices = {stage: torch.full((len(clients), len(clients)), torch.nan) for stage in names}
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


@ANALYSES.register("cka", "how alike clients' features are, a stage: mean curve, client x client, and over rounds")
def cka(paths: Sequence[Path]) -> Findings:
    """Compare the clients of the round after every checkpoint that was kept."""
    rows: list[tuple[Any, ...]] = []
    newest: dict[str, dict[str, Tensor]] = {}
    for path in paths:
        accuracies = {
            line["round"]: line["accuracy"][OVERALL]
            for line in MetricsLog(path / "metrics.jsonl").read()
            if "accuracy" in line
        }
        with opened(path) as (federation, servers):
            images, _ = probe_images(federation, IMAGES)
            for server in servers:
                trained = next_round(federation, server)
                seen = [features(model_of(federation, one.size, one.state), images) for one in trained]
                newest[path.name] = similarity(seen)
                rows += [
                    (path.name, server.round_number, stage, mean_off_diagonal(m), accuracies.get(server.round_number))
                    for stage, m in newest[path.name].items()
                ]
    return Findings(("run", "round", "stage", "cka", "accuracy"), rows, _draw(newest, rows))


def _draw(newest: dict[str, dict[str, Tensor]], rows: list[tuple[Any, ...]]) -> Figure:
    columns = max(len(matrices) for matrices in newest.values())
    figure = new_figure(3 * (columns + 2), 3 * len(newest))
    axes = figure.subplots(len(newest), columns + 2, squeeze=False)
    for line, (run, matrices) in zip(axes, newest.items(), strict=True):
        line[0].plot(list(matrices), [mean_off_diagonal(matrix) for matrix in matrices.values()], marker="o")
        line[0].set(title=f"{run}: mean", ylim=(0, 1.02), ylabel="CKA")
        line[0].tick_params(axis="x", rotation=30)
        _draw_rounds(line[1], [row for row in rows if row[0] == run])
        for axis, (stage, matrix) in zip(line[2:], matrices.items(), strict=False):
            axis.imshow(matrix, vmin=0, vmax=1, cmap="magma")
            axis.set(title=stage, xlabel="client", ylabel="client")
        for axis in line[len(matrices) + 2 :]:
            axis.axis("off")
    return figure


def _draw_rounds(axis: Axes, rows: list[tuple[Any, ...]]) -> None:
    """Draw every stage's CKA, and the accuracy, over rounds."""
    for stage in dict.fromkeys(row[2] for row in rows):
        points = [(number, similar) for _, number, name, similar, _ in rows if name == stage]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=stage)
    known = sorted({(number, accuracy) for _, number, _, _, accuracy in rows if accuracy is not None})
    if known:
        axis.plot(*zip(*known, strict=True), color="black", linestyle="--", label="accuracy")
    axis.set(title="over rounds", ylim=(0, 1.02), xlabel="round")
    axis.legend(fontsize="x-small")
