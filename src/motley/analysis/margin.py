"""Worst-case margin of a model on a data distribution: FedImpro's Definition 3.1.

    W_d(rho(theta), D) = E_{(x, y) ~ D} inf { d(x', x) : argmax_i rho(theta; x')_i != y }

The mean distance from an example to the nearest point that the model misclassifies. It is 0 for an
example that is misclassified itself. d is the Euclidean distance.

At the layer "input", x are images, as the model receives them (after the transform). At a stage,
the model is FedImpro's high level, x are the features that the low level computes, and d is the
distance of features. x' is not restricted to images or features that can occur.

The infimum has a closed form for linear models only. For others it is bounded from above by the
distance of a point that is misclassified: DeepFool (Moosavi-Dezfooli et al., CVPR 2016) finds one
by following the linearized model to its nearest class boundary, again and again, and a bisection
of the line to it finds where the class changes. DeepFool's first step is the estimate of Elsayed et
al. (NeurIPS 2018), whose margin FedImpro builds on. For a linear model the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from motley.analysis.features import INPUT, CutModel, cut
from motley.analysis.findings import Findings, analysis, new_figure
from motley.analysis.replay import (
    all_checkpoints,
    examples_at,
    global_model,
    log,
    sampled_rows,
)
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.methods.fedimpro_cut import Cut
from motley.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The number of examples per forward pass.
BATCH = 256
#: DeepFool's steps are this much longer than the way to the linearized boundary, to cross it.
OVERSHOOT = 0.02
#: Added to |f_j|, so that a point exactly on a boundary moves, as in DeepFool's code. The bisection
#: makes up for both.
NUDGE = 1e-4
#: Halvings of the line between an example and a misclassified point.
HALVINGS = 20
#: The name that stands for the cut of the run's method.
CUT = "cut"


class MarginSettings(Settings):
    """Settings of the analyses `margin` and `contribution`."""

    layers: tuple[str, ...] = (INPUT,)
    """Where distances are measured. input: images. A stage's name: the features behind it. cut:
    behind FedImpro's cut (method.cut), or the middle of the model for other methods. s_out: before
    the head.
    """
    examples: int = Field(200, ge=1)
    """At most this many random examples of each distribution are used."""
    steps: int = Field(50, ge=1)
    """Maximum number of DeepFool's steps per example."""
    candidates: int = Field(10, ge=1)
    """DeepFool looks for the nearest boundary to the classes with the highest logits, this many."""


class GlobalMarginSettings(MarginSettings):
    """Settings of the analysis `margin`."""

    data: Literal["test", "train"] = "test"
    """The distribution: the test set, or the union of all clients' training examples."""


def margins(
    classify: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    steps: int = 50,
    candidates: int = 10,
) -> Tensor:
    """Return the distance of each input to the nearest misclassified point that was found.

    `classify` computes the logits of a batch, each row from the same row of its inputs (models are
    in evaluation mode). The distance of an input is NaN if no point was found within `steps`.
    """
    distances = []
    batches = zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
    for batch, batch_labels in batches:
        points = misclassified_points(classify, batch, batch_labels, steps, candidates)
        points = nearest_on_line(classify, batch, points, batch_labels)
        distances.append((points - batch).flatten(1).norm(dim=1))
    return torch.cat(distances)


def misclassified_points(
    classify: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
    steps: int,
    candidates: int,
) -> Tensor:
    """Return a misclassified point near each input, or NaN if none was found (DeepFool).

    With f_j = logit_j - logit_y of a class j other than y, and w_j its gradient, the nearest
    linearized boundary belongs to the j with the smallest |f_j| / |w_j|, and the step to it is
    |f_j| / |w_j|^2 w_j.
    """
    result = torch.full_like(inputs, torch.nan)
    # Positions in the batch of the examples whose points are still classified correctly.
    active = torch.arange(len(inputs), device=inputs.device)
    points = inputs.clone()
    for number in range(steps + 1):
        points = points.detach().requires_grad_()
        logits = classify(points)
        is_wrong = logits.argmax(1) != labels[active]
        result[active[is_wrong]] = points.detach()[is_wrong]
        if is_wrong.all() or number == steps:
            break
        step = _step_to_boundary(points, logits, labels[active], candidates)
        # The step is infinite where all gradients are 0: there is no direction to follow.
        goes_on = ~is_wrong & step.flatten(1).isfinite().all(1)
        points = points.detach()[goes_on] + (1 + OVERSHOOT) * step[goes_on]
        active = active[goes_on]
        if not len(active):
            break
    return result


def _step_to_boundary(points: Tensor, logits: Tensor, labels: Tensor, candidates: int) -> Tensor:
    """Return the step of each point to the nearest boundary of the linearized model."""
    true = logits.gather(1, labels[:, None])
    others = logits.detach().scatter(1, labels[:, None], -torch.inf)
    classes = others.topk(min(candidates, logits.shape[1] - 1)).indices
    # Negative for points that are classified correctly, one column per class.
    differences = logits.gather(1, classes) - true
    shortest = torch.full((len(points),), torch.inf, device=points.device)
    steps = torch.full_like(points, torch.inf)
    for column in range(classes.shape[1]):
        difference = differences[:, column]
        # The rows of a batch do not depend on each other, so this is each row's own gradient.
        (gradient,) = torch.autograd.grad(difference.sum(), [points], retain_graph=True)
        norm = gradient.flatten(1).norm(dim=1)
        distance = (difference.detach().abs() + NUDGE) / norm
        is_shorter = distance < shortest
        shortest = torch.where(is_shorter, distance, shortest)
        scale = (distance / norm)[is_shorter]
        steps[is_shorter] = gradient[is_shorter] * scale.view(-1, *[1] * (gradient.dim() - 1))
    return steps


@torch.no_grad()
def nearest_on_line(
    classify: Callable[[Tensor], Tensor], inputs: Tensor, points: Tensor, labels: Tensor
) -> Tensor:
    """Return the misclassified point nearest to each input on the line to a misclassified point.

    This is the input itself if it is misclassified. Points that are NaN stay so.
    """
    shape = (-1, *[1] * (inputs.dim() - 1))
    # Fractions of the way from the input to the point. The model classifies correctly at `near`
    # and wrongly at `far`.
    near = torch.zeros(len(inputs), device=inputs.device)
    far = torch.ones(len(inputs), device=inputs.device)
    far[classify(inputs).argmax(1) != labels] = 0
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        is_wrong = classify(inputs + middle.view(shape) * (points - inputs)).argmax(1) != labels
        far = torch.where(is_wrong, middle, far)
        near = torch.where(is_wrong, near, middle)
    return inputs + far.view(shape) * (points - inputs)


def mean_margin(distances: Tensor, weights: Tensor | None = None) -> tuple[float, float]:
    """Return W_d, and the share of examples without a distance, which are left out of it.

    `weights` are the probabilities of the examples, up to a factor; by default they are equal.
    """
    if weights is None:
        weights = torch.ones_like(distances)
    weights = weights.double()
    missing = distances.isnan()
    known = weights[~missing]
    mean = (distances[~missing].double() * known).sum() / known.sum()
    return float(mean), float(weights[missing].sum() / weights.sum())


def layers_of_sizes(
    federation: Federation, layers: Iterable[str], key: str
) -> dict[str, list[str]]:
    """Return, for every size, the stages that the setting `key` names.

    "cut" is replaced by the stage at which FedImpro cuts the size. Unknown stages are rejected.
    """
    names: dict[str, list[str]] = {}
    for size, blueprint in federation.split.blueprints.items():
        names[size] = []
        for layer in layers:
            if layer == CUT:
                layer = cut_stage(federation, size, key)
            cut(blueprint.module, layer, key, size)
            names[size].append(layer)
    return names


def cut_stage(federation: Federation, size: str, key: str) -> str:
    """Return the stage at which the run's method cuts a size, or else its middle."""
    stage = getattr(federation.config.method, "cut", "")
    try:
        return Cut(federation.split, federation.method.info.input_shape, stage).names[size]
    except MotleyError as error:
        raise MotleyError(f"{key} = {CUT!r}: {error}") from None


def frozen(model: nn.Module, layer: str, key: str) -> CutModel:
    """Return a model cut at a layer, without gradients of its parameters: only inputs need them."""
    return cut(model.requires_grad_(False), layer, key)


@torch.no_grad()
def in_batches(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply a function to batches, and return all results as one tensor."""
    return torch.cat([function(batch) for batch in inputs.split(BATCH)])


@analysis(
    "margin",
    "worst-case margin of every size over rounds: the distance to misclassified points",
    GlobalMarginSettings,
    classes=True,
)
def margin(paths: Sequence[Path], settings: GlobalMarginSettings) -> Findings:
    """Compute the margin of the global model of every size at every checkpoint."""
    rows: list[tuple[Any, ...]] = []
    for run, federation, server in all_checkpoints(paths):
        layers_of_size = layers_of_sizes(federation, settings.layers, "margin.layers")
        images, labels = _examples(federation, settings)
        for size, layers in layers_of_size.items():
            model = global_model(federation, server, size)
            for layer in layers:
                log.info("%s: margins of %s, round %d, %s", run, size, server.round_number, layer)
                low, high = frozen(model, layer, "margin.layers")
                distances = margins(
                    high,
                    in_batches(low, images),
                    labels,
                    steps=settings.steps,
                    candidates=settings.candidates,
                )
                mean, missing = mean_margin(distances)
                accuracy = float((distances != 0).double().mean())
                rows.append((run, server.round_number, size, layer, mean, accuracy, missing))
    columns = ("run", "round", "size", "layer", "margin", "accuracy", "not found")
    return Findings(columns, rows, _draw(rows))


def _examples(federation: Federation, settings: GlobalMarginSettings) -> tuple[Tensor, Tensor]:
    """Return random examples of the distribution on which margins are computed."""
    is_test = settings.data == "test"
    data = federation.dataset.test if is_test else federation.dataset.train
    rows = np.arange(len(data)) if is_test else federation.partition.indices
    rows = sampled_rows(rows, settings.examples, federation.config.seed, settings.data)
    return examples_at(federation, data, rows)


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    """Draw one plot per layer: one curve per run and size."""
    layers = list(dict.fromkeys(row[3] for row in rows))
    figure = new_figure(5 * len(layers) + 2, 4)
    axes = figure.subplots(1, len(layers), squeeze=False)[0]
    for axis, layer in zip(axes, layers, strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for run, number, size, layer_of_row, mean, *_ in rows:
            if layer_of_row == layer:
                curves.setdefault(f"{run}, {size}", []).append((number, mean))
        for label, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(title=f"worst-case margin, {layer}", xlabel="round", ylabel="Euclidean distance")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
