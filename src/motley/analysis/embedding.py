"""t-SNE of features, by class and client (InCo, Figure 9d-f; FedIN, Figures 3 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from motley.analysis.features import S_OUT, cut, features_at
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import (
    TrainedClient,
    client_examples,
    log,
    model_of,
    open_run,
    probe_images,
    train_next_round,
)
from motley.core.errors import MotleyError, unknown
from motley.extras import require
from motley.federation import Federation
from motley.models.facts import has_stages
from motley.server.state import ServerState
from motley.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: By default, clients of this many sizes and images of this many classes are drawn, as in InCo's
#: Figure 9.
CLIENTS, CLASSES = 3, 6
#: One marker per client; they repeat.
MARKERS = "o^sDvPX*<>"
#: t-SNE's perplexity is at most a third of the number of points.
MIN_POINTS = 4


class EmbeddingSettings(Settings):
    """Settings of the analysis `embedding`."""

    sizes: tuple[str, ...] = ()
    """One client of each of these sizes; a size that is named twice gives two clients. Clients that
    the run sampled come first. Default: the last three sizes.
    """
    clients: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The clients to draw, by their ids, instead of `sizes`."""
    classes: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The classes of the images. Default: the first six."""
    stage: str = S_OUT
    """The stage whose outputs are drawn. s_out: the input of the head, which FedIN exchanges."""
    examples: Literal["test", "own"] = "test"
    """test: the same test images for all clients. own: each client's training examples, as FedIN
    sends them.
    """
    images: int = Field(400, ge=1)
    """At most this many images per client are considered, before `classes` chooses among them."""
    color: Literal["class", "client"] = "class"
    """The meaning of colors. class: markers are clients. client: colors are clients."""

    @model_validator(mode="after")
    def _clients_or_sizes(self) -> EmbeddingSettings:
        if self.clients and self.sizes:
            raise ValueError("embedding.clients and embedding.sizes: give only one of them")
        return self


@analysis("embedding", "t-SNE of features by class and client", EmbeddingSettings, classes=True)
def embedding(paths: Sequence[Path], settings: EmbeddingSettings) -> Findings:
    """Draw features of a few clients of different sizes.

    The clients are trained in the round after the newest checkpoint, and drawn after their local
    updates.
    """
    require("sklearn", "the analysis embedding")
    from sklearn.manifold import TSNE

    rows: list[tuple[Any, ...]] = []
    for path in paths:
        with open_run(path) as (federation, servers):
            server = servers[-1]
            classes = chosen_classes(federation, settings.classes)
            numbers = chosen_clients(federation, server, settings)
            _check_stage(federation, server, numbers, settings.stage)
            clients, outputs, labels = [], [], []
            for client in train_next_round(federation, server, numbers):
                output, labels_of_client = _features(federation, client, classes, settings)
                clients += [client] * len(output)
                outputs.append(output)
                labels += labels_of_client
        points = _padded(outputs)
        if len(points) < MIN_POINTS:
            raise MotleyError(
                f"embedding.classes = {list(classes)}: {path} has {len(points)} images of them "
                f"among the first {settings.images}; t-SNE needs at least {MIN_POINTS}. Raise "
                "embedding.images, or choose other classes."
            )
        log.info("%s: t-SNE of %d points", path.name, len(points))
        perplexity = min(30.0, (len(points) - 1) / 3)
        tsne = TSNE(random_state=0, init="pca", perplexity=perplexity)
        for client, label, (x, y) in zip(
            clients, labels, tsne.fit_transform(points.numpy()).tolist(), strict=True
        ):
            rows.append((path.name, client.client, client.size, label, x, y))
    columns = ("run", "client", "size", "class", "x", "y")
    return Findings(columns, rows, _draw(rows, [path.name for path in paths], settings.color))


def chosen_classes(federation: Federation, classes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the classes to draw: from the settings, or the first ones."""
    count = federation.dataset.classes
    for label in classes:
        if label >= count:
            raise MotleyError(f"embedding.classes = {label}: Allowed: 0 to {count - 1}.")
    return classes or tuple(range(min(CLASSES, count)))


def chosen_clients(
    federation: Federation, server: ServerState, settings: EmbeddingSettings
) -> list[int]:
    """Return the clients to draw: from the settings, or one for each of the chosen sizes.

    Clients that the run sampled for the round come before others of their size.
    """
    total = federation.config.federation.clients
    for client in settings.clients:
        if client >= total:
            raise MotleyError(f"embedding.clients = {client}: Allowed: 0 to {total - 1}.")
    if settings.clients:
        return list(settings.clients)
    round_number = server.round_number + 1
    clients_by_size: dict[str, list[int]] = {size: [] for size in federation.split.sizes}
    for client in dict.fromkeys([*federation.sample(round_number), *range(total)]):
        clients_by_size[federation.size_of(client, round_number)].append(client)
    sizes = settings.sizes
    if not sizes:
        # A size may have no clients, depending on federation.size_fractions.
        sizes = tuple(size for size, clients in clients_by_size.items() if clients)[-CLIENTS:]
    chosen = []
    for size in sizes:
        if size not in clients_by_size:
            raise MotleyError(f"embedding.sizes: {unknown('size', size, clients_by_size)}")
        if not clients_by_size[size]:
            raise MotleyError(
                f"embedding.sizes = {list(sizes)}: the federation has fewer clients of size "
                f"{size!r}. Name it less often."
            )
        chosen.append(clients_by_size[size].pop(0))
    return chosen


def _check_stage(
    federation: Federation, server: ServerState, clients: list[int], stage: str
) -> None:
    """Reject a stage that a client's model lacks, before anything is trained."""
    for client in clients:
        size = federation.size_of(client, server.round_number + 1)
        module = federation.split.blueprints[size].module
        # The stages of a model that declares none are known when it runs.
        if has_stages(module):
            cut(module, stage, "embedding.stage", size)


def _features(
    federation: Federation,
    client: TrainedClient,
    classes: tuple[int, ...],
    settings: EmbeddingSettings,
) -> tuple[Tensor, list[int]]:
    """Return a client's features of the chosen stage, and the images' labels."""
    if settings.examples == "test":
        images, labels = probe_images(federation, settings.images)
    else:
        images, labels = client_examples(federation, client.client, settings.images)
    is_drawn = torch.isin(labels, torch.tensor(classes, device=labels.device))
    images, labels = images[is_drawn], labels[is_drawn]
    model = model_of(federation, client.size, client.state)
    output = features_at(model, images, settings.stage, "embedding.stage")
    return output.cpu(), labels.tolist()


def _padded(outputs: list[Tensor]) -> Tensor:
    """Return the features of all clients as one matrix.

    Sizes can differ in their number of features. Padding with zeros keeps all distances between the
    features of one size.
    """
    width = max(output.shape[1] for output in outputs)
    return torch.cat(
        [torch.nn.functional.pad(output, (0, width - output.shape[1])) for output in outputs]
    )


def _draw(rows: list[tuple[Any, ...]], runs: list[str], color: str) -> Figure:
    """Draw one plot per run."""
    figure = new_figure(5 * len(runs), 5)
    axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for axis, name in zip(axes, runs, strict=True):
        points: dict[str, list[tuple[float, float, int]]] = {}
        for run, client, size, label, x, y in rows:
            if run == name:
                points.setdefault(f"client {client} ({size})", []).append((x, y, label))
        _draw_run(axis, points, color)
        axis.set(title=name, xticks=[], yticks=[])
        axis.legend()
    return figure


def _draw_run(axis: Axes, points: dict[str, list[tuple[float, float, int]]], color: str) -> None:
    """Draw the points of each client: colors are classes and markers clients, or colors clients."""
    for number, (client, points_of_client) in enumerate(points.items()):
        xs, ys, classes = zip(*points_of_client, strict=True)
        if color == "client":
            axis.scatter(xs, ys, color=f"C{number % 10}", s=12, label=client)
        else:
            marker = MARKERS[number % len(MARKERS)]
            colors = [f"C{label % 10}" for label in classes]
            axis.scatter(xs, ys, c=colors, s=12, marker=marker, label=client)
