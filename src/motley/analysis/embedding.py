"""t-SNE of features, by class and client (InCo, Figure 9d-f; FedIN, Figures 3 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from motley.analysis.features import features
from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.analysis.replay import model_of, next_round, opened, probe_images
from motley.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, CLASSES, IMAGES = 3, 6, 400
MARKERS = "o^s"


@ANALYSES.register("embedding", "t-SNE of features by class and client")
def embedding(paths: Sequence[Path]) -> Findings:
    """Draw the last stage's features of three clients after their turn; of different sizes where there are several."""
    require("sklearn", "the analysis embedding")
    from sklearn.manifold import TSNE

    rows: list[tuple[Any, ...]] = []
    for path in paths:
        with opened(path) as (federation, servers):
            images, labels = probe_images(federation, IMAGES)
            few = labels < CLASSES
            by_size = {one.size: one for one in next_round(federation, servers[-1])}
            chosen = [by_size[size] for size in federation.split.sizes if size in by_size][-CLIENTS:]
            found = []
            for one in chosen:
                model = model_of(federation, one.size, one.state)
                found.append(list(features(model, images[few]).values())[-1].cpu())
        widest = max(feature.shape[1] for feature in found)
        padded = [torch.nn.functional.pad(feature, (0, widest - feature.shape[1])) for feature in found]
        points = TSNE(random_state=0, init="pca").fit_transform(torch.cat(padded).numpy())
        for one, part in zip(chosen, np.split(points, len(chosen)), strict=True):
            rows += [
                (path.name, one.client, one.size, label, x, y)
                for label, (x, y) in zip(labels[few].tolist(), part.tolist(), strict=True)
            ]
    return Findings(("run", "client", "size", "class", "x", "y"), rows, _draw(rows, [path.name for path in paths]))


def _draw(rows: list[tuple[Any, ...]], runs: list[str]) -> Figure:
    figure = new_figure(5 * len(runs), 5)
    for axis, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        own = [row for row in rows if row[0] == run]
        for marker, client in zip(MARKERS, dict.fromkeys(row[1:3] for row in own), strict=False):
            part = [row for row in own if row[1:3] == client]
            xs, ys = [row[4] for row in part], [row[5] for row in part]
            label = f"client {client[0]} ({client[1]})"
            axis.scatter(xs, ys, c=[row[3] for row in part], cmap="tab10", vmax=9, s=12, marker=marker, label=label)
        axis.set(title=run, xticks=[], yticks=[])
        axis.legend()
    return figure
