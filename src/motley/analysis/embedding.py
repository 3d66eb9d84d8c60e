"""t-SNE of features, by class and client (InCo, Figure 9d-f; FedIN, Figures 3 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from motley.analysis.features import features
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import model_of, open_run, probe_images, train_next_round
from motley.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: At most this many clients, classes and test images are drawn.
CLIENTS, CLASSES, IMAGES = 3, 6, 400
#: One marker per client.
MARKERS = "o^s"


@analysis("embedding", "t-SNE of features by class and client")
def embedding(paths: Sequence[Path]) -> Findings:
    """Draw the last stage's features of up to three clients of different sizes.

    The clients are those of the round after the newest checkpoint, after their local updates.
    """
    require("sklearn", "the analysis embedding")
    from sklearn.manifold import TSNE

    rows: list[tuple[Any, ...]] = []
    for path in paths:
        with open_run(path) as (federation, servers):
            images, labels = probe_images(federation, IMAGES)
            is_drawn = labels < CLASSES
            images, labels = images[is_drawn], labels[is_drawn]
            by_size = {client.size: client for client in train_next_round(federation, servers[-1])}
            sizes = [size for size in federation.split.sizes if size in by_size]
            clients = [by_size[size] for size in sizes[-CLIENTS:]]
            last_features = []
            for client in clients:
                model = model_of(federation, client.size, client.state)
                last_features.append(list(features(model, images).values())[-1].cpu())
        # Sizes can differ in their number of features. Padding with zeros keeps all distances
        # between the features of one size.
        width = max(values.shape[1] for values in last_features)
        padded = []
        for values in last_features:
            padded.append(torch.nn.functional.pad(values, (0, width - values.shape[1])))
        points = TSNE(random_state=0, init="pca").fit_transform(torch.cat(padded).numpy())
        points_of_clients = np.split(points, len(clients))
        for client, points_of_client in zip(clients, points_of_clients, strict=True):
            for label, (x, y) in zip(labels.tolist(), points_of_client.tolist(), strict=True):
                rows.append((path.name, client.client, client.size, label, x, y))
    columns = ("run", "client", "size", "class", "x", "y")
    return Findings(columns, rows, _draw(rows, [path.name for path in paths]))


def _draw(rows: list[tuple[Any, ...]], runs: list[str]) -> Figure:
    """Draw one plot per run: colors are classes and markers are clients."""
    figure = new_figure(5 * len(runs), 5)
    axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for axis, name in zip(axes, runs, strict=True):
        points: dict[str, list[tuple[float, float, int]]] = {}
        for run, client, size, label, x, y in rows:
            if run == name:
                points.setdefault(f"client {client} ({size})", []).append((x, y, label))
        for marker, (client, points_of_client) in zip(MARKERS, points.items(), strict=False):
            xs, ys, classes = zip(*points_of_client, strict=True)
            axis.scatter(xs, ys, c=classes, cmap="tab10", vmax=9, s=12, marker=marker, label=client)
        axis.set(title=name, xticks=[], yticks=[])
        axis.legend()
    return figure
